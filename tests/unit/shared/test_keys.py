from __future__ import annotations

import re

import pytest
from redis.crc import key_slot

from penstock.shared.errors import ValidationError
from penstock.shared.keys import Keys, channel_in


def test_all_keys_of_a_model_share_one_hash_tag() -> None:
    keys = Keys("ns").model("org/model-7b")
    spelled = [value for name, value in vars(keys).items() if name not in ("name", "prefix")]
    spelled += [keys.request("r"), keys.log("r"), keys.output("r"), keys.parked("r")]
    spelled += [keys.lane("b", "t"), keys.claims("e"), keys.engine_commands("e")]
    spelled += [keys.call_replies("c"), keys.call_reply("c", "e")]
    assert keys.leases in spelled
    assert {re.search(r"\{(.*?)\}", key)[1] for key in spelled} == {"org/model-7b"}  # type: ignore[index]  # all match
    assert len(set(spelled)) == len(spelled)


@pytest.mark.parametrize("name", ["", "a{b", "a}b", "a\nb", "x" * 201, None, 3])
def test_a_name_that_would_break_a_key_is_refused(name: object) -> None:
    with pytest.raises(ValidationError, match="model must"):
        Keys("ns").model(name)  # type: ignore[arg-type]  # that is the point


def test_channels_of_database_0_have_the_names_that_they_always_had() -> None:
    assert Keys("ns").model("m").wake == channel_in(0, "ns:{m}:wake") == "ns:{m}:wake"


def test_channels_of_other_databases_have_names_that_nothing_else_has() -> None:
    keys = Keys("ns").model("org/model")
    channels = [keys.output("r"), keys.output("}/3:r"), keys.wake, keys.engine_commands("e"), keys.call_replies("c")]
    channels += [keys.group_waves("g"), Keys("ns").worker_commands("w")]
    names = {channel_in(database, channel) for database in (0, 1, 3, 13) for channel in channels}
    assert len(names) == 4 * len(channels)
    assert channel_in(3, keys.output("r")) == "ns:{org/model}/3:output:r"
    assert channel_in(3, Keys("ns").worker_commands("w")) == "ns:worker/3:w:commands"
    # Permissions of older versions match them, and a cluster has them where it has the model.
    assert all(name.startswith("ns:") for name in names)
    assert key_slot(channel_in(3, keys.wake).encode()) == key_slot(keys.wake.encode())
