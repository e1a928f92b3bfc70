"""The demo model with faults that a prompt sets off, loaded through transformers like any model with code of its own.

A prompt that holds one of the signs below makes each forward pass that computes it show the sign's fault. The model
never outputs one of them. A sign is three equal tokens: two of them side by side set it off, once in a pass, which
nothing but these prompts has, and a batch that is cut in pieces keeps two of three together.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from penstock.ops.demo.run import MODEL

ABORT, RAISE, HOLD_GIL, HANG, KILL, BUSY_THREAD = "###", "$$$", "%%%", "&&&", "@@@", "~~~"

_CODE = """
import ctypes, os, signal, threading, time
import torch
from transformers import LlamaForCausalLM

FAULTS = {faults}
STEP_DELAY_S = {step_delay_s}
GIL_S = {gil_s}


def busy():
    end = time.monotonic() + GIL_S
    while time.monotonic() < end:
        sum(range(10_000))


def act(sign):
    if sign == "#":
        os.abort()
    if sign == "$":
        raise RuntimeError("a fault of one request")
    if sign == "%":
        ctypes.PyDLL(None).usleep(int(GIL_S * 1e6))  # PyDLL keeps the GIL
    if sign == "&":
        time.sleep(3600)
    if sign == "@":
        os.kill(os.getpid(), signal.SIGKILL)
    if sign == "~":
        threading.Thread(target=busy, daemon=True).start()


class FaultyLlamaForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        token_ids = input_ids[0].tolist()
        pairs = zip(token_ids, token_ids[1:])
        for token_id in set(one for one, following in pairs if one == following and one in FAULTS):
            act(FAULTS[token_id])
        if STEP_DELAY_S:
            time.sleep(STEP_DELAY_S)
        return super().forward(input_ids=input_ids, **kwargs)
"""


def make_faulty_model(folder: Path, *, step_delay_s: float = 0.0, gil_s: float = 5.0) -> Path:
    """Write the model into ``folder`` and return it; to be served with ``--trust-remote-code``.

    Args:
        step_delay_s: additional time of each step, so that a test can act between two tokens.
        gil_s: how long ``HOLD_GIL`` holds it, and ``BUSY_THREAD`` computes.
    """
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    faults = {vocabulary[sign[0]]: sign[0] for sign in (ABORT, RAISE, HOLD_GIL, HANG, KILL, BUSY_THREAD)}
    (folder / "modeling_faulty.py").write_text(_CODE.format(faults=faults, step_delay_s=step_delay_s, gil_s=gil_s))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["FaultyLlamaForCausalLM"]
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_faulty.FaultyLlamaForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
