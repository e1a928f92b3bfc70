"""`penstock chaos`: random deaths and stops of every process while requests run, and a check that none was harmed."""
