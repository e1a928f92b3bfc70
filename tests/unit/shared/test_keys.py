from __future__ import annotations

import re

import pytest

from penstock.shared.errors import ValidationError
from penstock.shared.keys import Keys


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
