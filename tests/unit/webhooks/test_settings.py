"""Times at which an event is tried again, and their settings."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.producer.webhooks.secrets import check_secret, new_secret
from penstock.producer.webhooks.settings import WebhookSettings
from penstock.shared.errors import ConfigurationError, ValidationError


def test_an_event_is_tried_for_about_a_day() -> None:
    settings = WebhookSettings()
    delays = [settings.delay_s(attempt) for attempt in range(1, 11)]
    assert delays[:4] == [5, 20, 80, 320]
    assert delays[-1] == 21600
    assert settings.delay_s(11) is None
    assert 25 * 3600 < sum(delay for delay in delays if delay is not None) < 26 * 3600


@pytest.mark.parametrize("name", ["timeout_s", "max_attempts", "first_delay_s", "max_delay_s", "max_response_bytes"])
def test_a_setting_that_makes_no_sense_is_named(name: str) -> None:
    fields: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigurationError, match=name):
        WebhookSettings(**fields)


def test_a_secret_is_one_of_standard_webhooks() -> None:
    assert check_secret(new_secret()) != new_secret()
    for secret in ("", "whsec_", "whsec_c2hvcnQ=", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_not base64!"):
        with pytest.raises(ValidationError, match="a secret must be"):
            check_secret(secret)
