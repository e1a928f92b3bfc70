"""What an engine computes on, by name, and which of its instructions kernels may use."""

from __future__ import annotations

from ...shared.processor import this_processor


def processor(device: str) -> tuple[str, list[str]]:
    """Return name and instructions of the GPU, or of the processor, that an engine on ``device`` computes on."""
    if device == "cuda":
        import torch

        major, minor = torch.cuda.get_device_capability()
        return torch.cuda.get_device_name(), [f"sm_{major}{minor}"]
    return this_processor()
