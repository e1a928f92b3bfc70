"""The rule by which several models share one device. Pure: used by keepers of devices and by the simulator."""
