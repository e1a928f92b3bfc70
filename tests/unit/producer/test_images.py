"""Images in callers' forms become files next to the request, which holds their digests."""

from __future__ import annotations

import base64
import io
from typing import Any

import msgspec
import pytest

from penstock.producer.inputs.images import split_prompt
from penstock.producer.inputs.prompt import as_prompts, build_request
from penstock.producer.requests.queue_entry import Outgoing
from penstock.shared.deployment.records import ModelCard
from penstock.shared.errors import PenstockError, UnsupportedParameterError, ValidationError
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.images import MAX_IMAGE_BYTES, ImageInput

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
CARD = ModelCard(model="m")
PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def file(pixels: Any = PIXELS) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


URL = "data:image/png;base64," + base64.b64encode(file()).decode()


def pixels_of(image: ImageInput) -> Any:
    return np.asarray(Image.open(io.BytesIO(image.data))).tolist()


PICTURES = [file(), bytearray(file()), memoryview(file()), Image.fromarray(PIXELS), PIXELS]


@pytest.mark.parametrize("image", PICTURES, ids=lambda image: type(image).__name__)
def test_whatever_holds_pixels_is_taken(image: Any) -> None:
    prompt, (image_data,) = split_prompt({"prompt": "<image> hi", "multi_modal_data": {"image": image}})
    assert (prompt, pixels_of(image_data)) == ("<image> hi", PIXELS.tolist())


def test_parts_of_messages_leave_their_places() -> None:
    parts: list[Any] = [
        {"type": "text", "text": "two:"},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image", "image": PIXELS},
        {"type": "input_image", "image_url": URL},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "and?"}]
    request = build_request(messages, None, card=CARD)
    assert request.messages is not None
    assert request.messages[0]["content"] == [{"type": "text", "text": "two:"}, *[{"type": "image"}] * 3]
    assert [pixels_of(image) for image in request.images or []] == [PIXELS.tolist()] * 3
    assert parts[2]["image"] is PIXELS


def test_the_payload_has_digests_and_bytes_are_stored_separately() -> None:
    request = build_request({"prompt": "hi", "multi_modal_data": {"image": [file(), file()]}}, None, card=CARD)
    entry = Outgoing(request, {}, 0).entry(result_ttl_ms=1, fail_fast=False, max_payload_bytes=1 << 20)
    assert entry.images == (ImageInput.from_bytes(file()),) * 2
    assert file() not in entry.payload
    message = decoded(entry.payload)
    assert message.images == [ImageInput(ImageInput.from_bytes(file()).digest)] * 2
    assert entry.num_bytes == len(entry.payload) + 2 * len(file())


def decoded(payload: bytes) -> EngineCoreRequest:
    return msgspec.msgpack.decode(payload, type=EngineCoreRequest)


def test_prompts_with_images_are_distinguished_from_messages() -> None:
    beside = {"prompt": "hi", "multi_modal_data": {"image": file()}}
    assert as_prompts(beside) == [beside]
    assert as_prompts([beside, beside]) == [beside, beside]
    message = {"role": "user", "content": "hi"}
    assert as_prompts([message]) == [[message]]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "a", "prompt_token_ids": [1]}, "must have one of prompt, prompt_token_ids"),
        ({"prompt": "a", "mm_processor_kwargs": {}}, "mm_processor_kwargs.* is not supported"),
        ({"prompt": "a", "multi_modal_data": {"audio": 1}}, "audio.* is not supported"),
        ({"prompt": "a", "multi_modal_data": [file()]}, "multi_modal_data must be a dictionary"),
        ({"prompt": "a", "multi_modal_data": {"image": "cat.png"}}, r"multi_modal_data\['image'\]\[0\] must be bytes"),
        ({"prompt": "a", "multi_modal_data": {"image": b"cat"}}, "no image of a kind that is read"),
        ({"prompt": "a", "multi_modal_data": {"image": PIXELS / 255}}, "must be an array of uint8"),
        ({"prompt": "a", "multi_modal_data": {"image": Image.new("F", (5, 5))}}, "has mode F, .* convert it"),
        ({"prompt": "a", "multi_modal_data": {"image": PIXELS[None, None]}}, "not the array of an image"),
        ({"prompt": "a", "multi_modal_data": {"image": [file()] * 65}}, "^images: a request has at most 64, got 65"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\].content\[0\].image must be an image"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\].image_url must be the URL"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "data:x"}]}],
            r"content\[0\].image_url must be a data URL",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": URL + "*"}]}],
            r"content\[0\].image_url is not base64",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,"}}]}],
            r"^messages\[0\].content\[0\].image_url.url is an image of no bytes",
        ),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], "file_id is not supported"),
    ],
)
def test_invalid_images_are_refused_with_a_reason(prompt: Any, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        split_prompt(prompt)


@pytest.mark.parametrize("head", ["DATA:image/png;base64,", "data:image/png;BASE64,", "Data:;Base64,"])
def test_the_words_of_a_data_url_have_no_case(head: str) -> None:
    """RFC 2397 and RFC 3986, section 3.1."""
    url = head + URL.partition(",")[2]
    _, images = split_prompt([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    assert [image.data for image in images] == [file()]


def test_together_they_have_a_bound() -> None:
    large = [file() + bytes([number]) * (MAX_IMAGE_BYTES - len(file())) for number in range(4)]
    with pytest.raises(
        PenstockError, match=r"^images: they have .* bytes together, and a request has at most 67108864"
    ):
        split_prompt({"prompt": "a", "multi_modal_data": {"image": large}})
    # The same one is sent once.
    _, images = split_prompt({"prompt": "a", "multi_modal_data": {"image": large[:1] * 4}})
    assert len(images) == 4


def test_too_many_images_are_refused() -> None:
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": [file()] * 3}}
    for card in (CARD, ModelCard(model="m", max_images=3)):
        assert len(build_request(prompt, None, card=card).images or []) == 3
    with pytest.raises(ValidationError, match=r"'m' takes at most 2 in a request, got 3.* --max-images"):
        build_request(prompt, None, card=ModelCard(model="m", max_images=2))
    blind = ModelCard(model="m", max_images=0, image_refusal="this model reads no images")
    with pytest.raises(UnsupportedParameterError, match="images: this model reads no images; send text alone"):
        build_request(prompt, None, card=blind)


def test_only_the_gateway_fetches() -> None:
    with pytest.raises(UnsupportedParameterError, match="only the gateway can fetch"):
        split_prompt([{"role": "user", "content": [{"type": "image_url", "image_url": "http://a.example"}]}])
