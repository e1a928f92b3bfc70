"""The script of the engines: what the model answers to the text of a prompt."""

from __future__ import annotations

import json
import re
from typing import Any

from .model_folder import RESULT_START, TOOLS_END, TOOLS_START, TURN_START

ANSWER = "Four plus two is six. That is the whole answer, in a few more words than it needs."
DONE = "The work is done: the result of the tool is there, and nothing is left to do in this turn."
FILE, TEXT = "hello.txt", "hi\n"
# A prompt with this text gets JSON, also without a schema.
AS_JSON = "Answer as JSON"
WEATHER: dict[str, Any] = {"city": "Bonn"}
# A work folder of a program, which prompts of agents contain.
WORK_FOLDER = re.compile(r"/[A-Za-z0-9_./-]*/penstock-clients-[a-z0-9_]+/[a-z0-9-]+/work")

_NAME = re.compile(r'"name": "([^"]+)"')


def calls(folder: str) -> dict[str, dict[str, Any]]:
    """Return the arguments with which the model calls each tool that it knows, the first offered one of them."""
    path = f"{folder}/{FILE}"
    return {
        "exec_command": {"cmd": f"printf 'hi\\n' > {FILE}"},
        "shell": {"command": ["bash", "-c", f"printf 'hi\\n' > {FILE}"]},
        "Write": {"file_path": path, "content": TEXT},
        "write": {"filePath": path, "content": TEXT},
        "write_file": {"file_path": path, "content": TEXT},
        "get_weather": WEATHER,
    }


def scripted_answer(prompt: str, schema: dict[str, Any] | None) -> str:
    """Return the answer to a prompt: a call of a tool that it offers, or text once the last turn has a result.

    Args:
        schema: JSON schema that the answer must follow, which is that of a forced call or of ``WEATHER``.
    """
    turn = prompt.rpartition(f"{TURN_START}user")[2]
    offered = _NAME.findall(prompt.partition(TOOLS_START)[2].partition(TOOLS_END)[0])
    if schema is not None and schema.get("type") == "array":
        return json.dumps([{"name": offered[0], "parameters": WEATHER}])
    if schema is not None:
        return json.dumps(WEATHER)
    if RESULT_START in turn:
        return DONE
    if AS_JSON in turn:
        return json.dumps(WEATHER)
    folder = WORK_FOLDER.search(prompt)
    calls_by_name = calls("." if folder is None else folder[0])
    name = next((name for name in offered if name in calls_by_name), None)
    if name is None:
        return ANSWER
    call = json.dumps({"name": name, "arguments": calls_by_name[name]})
    return f"I use the tool for this.\n<tool_call>\n{call}\n</tool_call>"
