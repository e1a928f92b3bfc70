"""opencode, which speaks chat completions."""

from __future__ import annotations

import json

from ..deployment import MODEL
from ..program import TASK, Program, Trial, does_task


def _run_opencode(trial: Trial) -> None:
    model = {"name": MODEL, "tool_call": True, "limit": {"context": 200_000, "output": 4096}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Penstock",
        "options": {"baseURL": trial.base_url, "apiKey": "any"},
        "models": {MODEL: model},
    }
    settings = {
        "model": f"penstock/{MODEL}",
        "small_model": f"penstock/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"penstock": provider},
        "permission": {"edit": "allow", "bash": "allow"},
    }
    (trial.work / "opencode.json").write_text(json.dumps(settings))
    opencode = trial.installed.node_modules / ".bin" / "opencode"
    environment = {f"OPENCODE_DISABLE_{name}": "1" for name in ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD")}
    # Without a title opencode asks the model for one, and the killed engine could be that of the title.
    trial.run_command([opencode, "run", "--title", "hello", TASK], environment)


OPENCODE = Program("opencode", ["opencode-ai"], "npm", does_task(_run_opencode))
