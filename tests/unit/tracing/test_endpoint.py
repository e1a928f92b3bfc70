"""The endpoint of spans, and the libraries that it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.producer import Client
from penstock.producer.gateway.app import build_app
from penstock.producer.gateway.settings import GatewaySettings
from penstock.shared.errors import ConfigurationError, ValidationError
from penstock.shared.tracing.endpoint import check_endpoint
from penstock.shared.tracing.tracing import open_tracing


@pytest.mark.parametrize(
    ("address", "used"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
        ("https://example.org/otlp/mine?a=b", "https://example.org/otlp/mine?a=b"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_an_address_without_a_path_gets_the_usual_one(address: str, used: str) -> None:
    assert check_endpoint(address) == used


NO_ENDPOINTS = ["", "collector:4318", "grpc://collector:4317", "http://", "http://c:99999999", "http://[::1", None]


@pytest.mark.parametrize("address", NO_ENDPOINTS)
def test_invalid_endpoints_are_refused_by_name(address: str) -> None:
    with pytest.raises(ConfigurationError, match="otlp_traces_endpoint must be the URL of a receiver of OTLP"):
        check_endpoint(address)


def test_client_and_gateway_refuse_an_invalid_endpoint_at_creation() -> None:
    with pytest.raises(ConfigurationError, match="otlp_traces_endpoint must be the URL"):
        Client("redis://localhost", otlp_traces_endpoint="collector")
    with pytest.raises(ConfigurationError, match="otlp_traces_endpoint must be the URL"):
        build_app(GatewaySettings(redis_url="redis://localhost", otlp_traces_endpoint="collector"))
    with pytest.raises(ValidationError, match="tracer_provider must be a TracerProvider of OpenTelemetry, got 'mine'"):
        Client("redis://localhost", tracer_provider="mine")  # type: ignore[arg-type]  # the mistake that is tested
    with pytest.raises(ValidationError, match="two destinations of the same spans"):
        Client("redis://localhost", otlp_traces_endpoint="http://c", tracer_provider=object())  # type: ignore[arg-type]


def test_opentelemetry_can_be_turned_off_by_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracing("http://collector", "mine").provider is None


WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
from penstock.shared.errors import ConfigurationError

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"no {name}", name=name)

sys.meta_path.insert(0, Refuse())
from penstock.producer import Client
from penstock.producer.gateway.app import build_app
from penstock.producer.gateway.settings import GatewaySettings
from penstock.producer.jobs.context import JobContext
from penstock.worker.serving import process

Client("redis://localhost")
build_app(GatewaySettings(redis_url="redis://localhost"))
try:
    Client("redis://localhost", otlp_traces_endpoint="http://collector:4318")
except ConfigurationError as error:
    print(error)
"""


def test_without_the_extra_only_the_option_fails_and_names_it() -> None:
    pytest.importorskip("arq")  # one of the programs is built with it
    result = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert (
        result.stdout.strip() == "otlp_traces_endpoint needs OpenTelemetry's exporter: pip install 'penstock-llm[otel]'"
    ), result.stderr
