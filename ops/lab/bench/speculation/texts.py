"""Prompts and expected answers: a list with one change, JSON by a schema, and prose.

The acceptance rate depends only on the texts. So they are realistic: lists and orders are drawn by a seed, and the
prose was written for this file.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec

COPY, JSON, PROSE = "copying", "json", "prose"
KINDS = (COPY, JSON, PROSE)
NUM_LINES = 12
_SEED = 7

_THINGS = (
    "kettle", "lantern", "ladder", "blanket", "compass", "hammer", "teapot", "mirror", "bucket", "basket", "saddle",
    "anchor", "whistle", "candle", "pillow", "carpet", "bottle", "shovel", "trumpet", "wallet", "helmet", "napkin",
)  # fmt: skip
_PLACES = ("cellar", "attic", "barn", "harbour", "kitchen", "workshop", "garden", "library")
_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "grey", "brown")
_PEOPLE = ("Ada Brook", "Tom Hill", "Mia Stone", "Ian Wood")
_CITIES = ("Porto", "Turin", "Ghent", "Malmo")

_ITEM = {
    "type": "object",
    "properties": {
        "article": {"type": "string"},
        "colour": {"type": "string", "enum": list(_COLOURS)},
        "quantity": {"type": "integer"},
        "price_in_cents": {"type": "integer"},
    },
    "required": ["article", "colour", "quantity", "price_in_cents"],
    "additionalProperties": False,
}
ORDER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer": {"type": "string"},
        "delivery_city": {"type": "string"},
        "items": {"type": "array", "items": _ITEM, "minItems": 5, "maxItems": 5},
        "is_express_delivery": {"type": "boolean"},
    },
    "required": ["customer", "delivery_city", "items", "is_express_delivery"],
    "additionalProperties": False,
}

_PROSE = {
    "Why do rivers bend?": (
        "A river that runs straight does not stay so for long. Somewhere a stone, a fallen tree or a softer patch of "
        "soil turns the water a little to one side, and where it strikes the bank it runs faster and carries earth "
        "away. On the other side the current is slow, and what was carried is dropped again. So the outer bank moves "
        "back while the inner one grows, and a small turn becomes a wide loop. After many years two loops may come so "
        "close that a flood breaks through between them. Then the old bend is left behind as a quiet lake in the "
        "shape of a new moon, fish and reeds settle in it, and the river begins its work again further down the "
        "valley, as if nothing had happened."
    ),
    "How does bread rise?": (
        "Yeast is alive, and like everything that lives it wants to eat. In warm dough it finds sugar, which it turns "
        "into alcohol and a gas. The gas would escape at once if flour and water were only a paste, but kneading has "
        "joined their proteins to long elastic strands that hold it like the skin of a balloon. Thousands of little "
        "bubbles grow, and with them the loaf. Too much heat would kill the helpers before they are done, while in a "
        "cold room they need a whole night, which bakers say gives a better taste. In the oven the bubbles swell once "
        "more, the alcohol is gone within minutes, the strands grow stiff, and what was soft and sticky keeps its "
        "shape on the table."
    ),
    "What did sailors do before clocks?": (
        "To know how far north a ship had come was never hard: one measured how high the sun stood at noon, or the "
        "pole star after dark. East and west were another matter, since the sky turns and looks the same an hour "
        "later one street further on. Captains threw a log overboard, counted knots on the line that ran after it, "
        "and multiplied by the hours of a sand glass that a tired boy had perhaps forgotten to turn. Errors added up "
        "day by day. Whole fleets were lost on rocks that their charts placed far away. Only when a carpenter from "
        "Yorkshire had built a watch that kept its pace through storms and heat could anybody say with some "
        "confidence where on the ocean he was."
    ),
    "How do cats land on their feet?": (
        "A cat that falls has nothing to push against, and yet it turns around in less than half a second. It does so "
        "in two parts. First it bends in the middle, pulls in the front paws and stretches the hind legs, so that the "
        "upper body spins quickly while the lower one hardly moves, just as skaters whirl faster with folded arms. "
        "Then it does the opposite, and the tail end follows. Nothing has been gained or lost on the whole, as "
        "physics demands, but the animal now faces the ground. Its back is supple, its collar bone is free, and an "
        "organ deep inside the ear tells it which way is down. Last of all the legs are spread, and four soft springs "
        "take the shock."
    ),
}


class Exercise(msgspec.Struct, frozen=True):
    """A request with its answer; ``schema`` constrains the answer, if not None."""

    kind: str
    prompt: str
    answer: str
    schema: dict[str, Any] | None = None


def all_exercises() -> list[Exercise]:
    """Four of each kind, the same in every run."""
    rng = Random(_SEED)
    copies = [_copy(rng) for _ in range(4)]
    orders = [_order(rng, name, city) for name, city in zip(_PEOPLE, _CITIES, strict=True)]
    return [*copies, *orders, *(Exercise(PROSE, f"{question}\n\n", answer) for question, answer in _PROSE.items())]


def _copy(rng: Random) -> Exercise:
    """Return an inventory, and the same with another number in one line."""
    lines = [
        f"- {rng.choice(_COLOURS)} {thing}, {rng.randint(2, 98)} pieces, in the {rng.choice(_PLACES)}"
        for thing in rng.sample(_THINGS, NUM_LINES)
    ]
    changed = rng.randrange(3, NUM_LINES - 3)
    name = lines[changed][2 : lines[changed].index(",")]
    new = f"- {name}, none left, order more"
    prompt = "\n".join([f"The last {name} was sold. Write the list again.", *lines, "", ""])
    return Exercise(COPY, prompt, "\n".join([*lines[:changed], new, *lines[changed + 1 :]]))


def _order(rng: Random, customer: str, city: str) -> Exercise:
    items = [
        {
            "article": thing,
            "colour": rng.choice(_COLOURS),
            "quantity": rng.randint(1, 20),
            "price_in_cents": rng.randint(100, 9999),
        }
        for thing in rng.sample(_THINGS, 5)
    ]
    is_express = rng.random() < 0.5
    words = ", ".join(f"{i['quantity']} {i['colour']} {i['article']} at {i['price_in_cents']}" for i in items)
    how = "by express" if is_express else "by post"
    prompt = f"{customer} in {city} orders {how}: {words}. As JSON:\n"
    order = {"customer": customer, "delivery_city": city, "items": items, "is_express_delivery": is_express}
    return Exercise(JSON, prompt, json.dumps(order), ORDER_SCHEMA)
