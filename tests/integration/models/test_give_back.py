"""Weights of the lean layout have a way back to where they were taken from."""

from __future__ import annotations

import pytest
import torch

from penstock.worker.models.lean.forward import LeanForward
from penstock.worker.models.weights.live_state import give_back, plain_state

from .lean_models import SETTINGS, VARIANTS_WITH_STATES, make_model


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("variant", VARIANTS_WITH_STATES)
def test_every_weight_is_returned_under_its_name(variant: str) -> None:
    own = make_model(variant, torch.bfloat16)
    original = {name: tensor.clone() for name, tensor in plain_state(own).items()}
    network = LeanForward(own, SETTINGS).network
    with torch.device("meta"):
        empty = type(own)(own.config)
    torch.nn.Module.to(empty, torch.bfloat16)
    give_back(network, empty)
    state = plain_state(empty)
    assert state.keys() == original.keys()
    for name, tensor in original.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor), name
