from __future__ import annotations

from pathlib import Path

import pytest

from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.worker.text.tokenizer import TextCodec


@pytest.fixture
def broker(commands: CommandConnection, namespace: str) -> Broker:
    return Broker(commands, Keys(namespace).model("m"))


@pytest.fixture(scope="module")
def codec(demo_model: Path) -> TextCodec:
    return TextCodec.load(demo_model)
