"""Pictures in chats, through the official client: what is read, and what is refused and how."""

import asyncio
import random
import threading
import time
import tracemalloc
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import torch
from PIL import Image

from quantize.checkpoints.from_transformers import Gemma4ImageProcessorPil
from quantize.errors import InputError
from quantize.runtime import Sample, generate
from quantize.runtime.prompt.chat import encode_chat
from quantize.runtime.prompt.images import place, prepare
from quantize.serve import pictures as module
from quantize.serve.pictures import MAX_BYTES, MAX_PICTURES, MAX_SCANS, prepared, read
from tests.support.pictures import bomb, data_url, encoded, part, picture
from tests.support.serving import (
    SAMPLER,
    Running,
    ScriptedEngine,
    engine_of,
    model,
    running,
    text_of,
    text_with_tools,
    tokenizer,
)

QUESTION = {"type": "text", "text": "What is this?"}
PNG = data_url(encoded(picture()))
STEPS = 2  # the tower is not trained, and what is said of its pictures never settles


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    with running() as found:
        yield found


def ask(server: Running, content: list[dict[str, Any]], **options: Any) -> Any:
    create: Any = server.openai.chat.completions.create
    messages = [{"role": "user", "content": content}]
    body = {"num_inference_steps": STEPS} | options.pop("extra_body", {})
    return create(
        model="bundled", messages=messages, seed=3, max_tokens=64, extra_body=body, **options
    )


def in_process(pictures: list[Image.Image], soft_tokens: int) -> Sample:
    """What the runtime answers to the same pictures without any server."""
    content = [{"type": "image"}] * len(pictures) + [QUESTION]
    ids = encode_chat(tokenizer(), [{"role": "user", "content": content}], thinking=False)
    images, counts = prepare(pictures, model().config, soft_tokens)
    (sample,) = generate(
        engine_of(1), [place(ids, counts, model().config)], [3], max_new_tokens=64,
        sampler=replace(SAMPLER, max_denoising_steps=STEPS), images=[images],
    )  # fmt: skip
    return sample


@pytest.mark.parametrize("soft_tokens", [280, 70, 560])
def test_a_picture_is_what_the_runtime_sees(server: Running, soft_tokens: int) -> None:
    budget = {} if soft_tokens == 280 else {"extra_body": {"image_tokens": soft_tokens}}
    reply = ask(server, [part(PNG), QUESTION], **budget)
    assert reply.choices[0].message.content == text_of(in_process([picture()], soft_tokens))
    text_only = ask(server, [QUESTION]).usage.prompt_tokens
    _, (count,) = prepare([picture()], model().config, soft_tokens)
    assert soft_tokens / 2 < count <= soft_tokens
    assert reply.usage.prompt_tokens == text_only + count + 2  # between its begin and its end


def test_the_detail_of_a_picture_is_ignored_and_named(server: Running) -> None:
    seen = part(PNG)
    seen["image_url"]["detail"] = "high"
    body = {"model": "bundled", "messages": [{"role": "user", "content": [part(PNG), seen]}]}
    asked = body | {"num_inference_steps": 1, "max_tokens": 8}
    reply = server.http.post("/v1/chat/completions", json=asked)
    assert (reply.status_code, reply.headers["X-Ignored-Parameters"]) == (200, "detail")


def test_several_pictures_of_all_formats_keep_their_order(server: Running) -> None:
    shown = [picture(0), picture(1, (64, 96)), picture(2, (50, 50))]
    kinds = ("png", "jpeg", "webp")
    lossless = ({}, {"quality": 100, "subsampling": 0}, {"lossless": True})
    files = [
        encoded(image, kind, **how) for image, kind, how in zip(shown, kinds, lossless, strict=True)
    ]
    urls = [data_url(file, kind) for file, kind in zip(files, kinds, strict=True)]
    reply = ask(server, [*map(part, urls), QUESTION], extra_body={"image_tokens": 70})
    decoded = [read(url) for url in urls]
    assert reply.choices[0].message.content == text_of(in_process(decoded, 70))
    back = ask(server, [*map(part, urls[::-1]), QUESTION], extra_body={"image_tokens": 70})
    assert back.choices[0].message.content == text_of(in_process(decoded[::-1], 70))
    assert back.choices[0].message != reply.choices[0].message


def test_pictures_are_seen_in_streams_and_beside_others(server: Running) -> None:
    """Two choices, one stream: as alone."""
    whole = ask(server, [part(PNG), QUESTION], n=2)
    stream = ask(server, [part(PNG), QUESTION], stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content == text_of(in_process([picture()], 280))


def test_a_picture_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # as phones store what they hold upright
    turned = read(data_url(encoded(picture(), "JPEG", exif=exif), "jpeg"))
    assert turned.size == (64, 96)


GIF = data_url(encoded(picture(), "GIF"), "gif")
DISGUISED = data_url(encoded(picture(), "GIF"), "png")
BROKEN = data_url(encoded(picture())[:200])
LONG = data_url(encoded(picture(size=(800, 16))))
THREAD = data_url(encoded(picture(size=(4000, 2))))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:1/x.png", "this server fetches nothing"),
        ("https://example.org/x.png", "'https://example.org/x.png' is not read"),
        ("file:///etc/passwd", "'file:///etc/passwd' is not read"),
        ("/etc/passwd", "is not read"),
        (GIF, "'data:image/gif;base64,"),
        (DISGUISED, r"not a picture that can be read \(PNG, JPEG, WEBP\)"),
        ("data:image/png;base64,%%%", "not valid base64"),
        ("data:image/png;base64,ä", "not valid base64"),
        ("data:image/png;base64,", "not a picture"),
        (BROKEN, "not a picture that can be read"),
        (data_url(bomb(5000, 4000)), "5000 x 4000 pixels are too many: at most 14000000"),
        (data_url(bomb(40_000, 40_000)), "decompression bomb"),
        (LONG, "this model's vision tower knows 64 positions; ask for fewer"),
        (THREAD, "."),
        (data_url(bytes(MAX_BYTES + 1)), f"has {MAX_BYTES + 1} bytes; at most {MAX_BYTES}"),
    ],
)
def test_pictures_that_are_refused(server: Running, url: str, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        ask(server, [QUESTION, part(PNG), part(url)])
    assert caught.value.param == "messages[0].content[2].image_url"
    assert caught.value.code == "invalid_image"
    assert len(caught.value.message) < 300  # it does not send the picture back


def test_each_scan_of_a_jpeg_takes_time_so_few_are_read() -> None:
    """64 KB of scans of one byte took the thread for seconds."""
    file = encoded(picture(), "JPEG", progressive=True)
    at, end = file.rindex(module.JPEG_SCAN), file.rindex(b"\xff\xd9")

    def with_scans(count: int) -> str:
        more = file[at:end] * (count - file.count(module.JPEG_SCAN))
        return data_url(file[:end] + more + file[end:], "jpeg")

    assert read(with_scans(MAX_SCANS)).size == picture().size
    with pytest.raises(InputError, match=f"has {MAX_SCANS + 1} scans; at most {MAX_SCANS}"):
        read(with_scans(MAX_SCANS + 1))


@pytest.mark.parametrize("size", [(96, 64), (700, 500), (48, 48), (100, 64), (1, 1), (45, 50)])
def test_pictures_have_the_values_that_transformers_gives_them(size: tuple[int, int]) -> None:
    vision = model().config.vision_config
    processor: Any = Gemma4ImageProcessorPil(
        patch_size=vision.patch_size, pooling_kernel_size=vision.pooling_kernel_size,
        max_soft_tokens=280,
    )  # fmt: skip
    images, counts = prepare([picture(2, size)], model().config, 280)
    theirs = processor([picture(2, size)], return_tensors="pt")
    assert torch.equal(images.pixels, theirs["pixel_values"])
    assert torch.equal(images.positions, theirs["image_position_ids"])
    assert counts == list(theirs["num_soft_tokens_per_image"])


def test_a_large_picture_is_not_copied_again_and_again() -> None:
    """One of 16 million pixels, 700 bytes as WebP, took 224 MB more than its own."""
    large = picture(0, (1000, 1000))
    prepare([large], model().config, 70)
    tracemalloc.start()
    prepare([large], model().config, 70)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000  # of 3,000,000 that a copy takes


def test_what_is_decoded_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A WebP of 700 bytes and 16 million pixels took 317 MB; two of its images were copies."""
    url = data_url(encoded(picture(3), "WEBP"))
    monkeypatch.setattr(Image.Image, "copy", None)
    assert read(url).mode == "RGB"


def test_texts_do_not_wait_for_pictures_and_pictures_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request's 16 small files of 16 million pixels each held up all others for seconds."""
    goes_on, order = threading.Event(), list[str]()

    def slow(url: str) -> Image.Image:
        order.append(url[-6:])
        assert goes_on.wait(30)
        return read(url)

    monkeypatch.setattr(module, "read", slow)
    other = data_url(encoded(picture(1)))
    engine = ScriptedEngine()
    engine.free = True
    with running(engine) as server:
        asked = [[PNG, PNG, PNG], [other]]
        threads = [
            threading.Thread(target=ask, args=(server, [*map(part, urls), QUESTION]))
            for urls in asked
        ]
        waiting = server.service.picturer._work_queue
        threads[0].start()
        while not order:
            time.sleep(0.001)
        threads[1].start()
        while not waiting.qsize():
            time.sleep(0.001)
        assert ask(server, [QUESTION]).choices[0].finish_reason
        goes_on.set()
        for thread in threads:
            thread.join()
    assert order == [PNG[-6:], other[-6:], PNG[-6:], PNG[-6:]]


def test_pictures_that_have_no_room_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    monkeypatch.setattr(module, "read", lambda url: decoded.append(url) or read(url))
    with ThreadPoolExecutor(1) as thread:
        many = [("x", PNG)] * MAX_PICTURES
        _, counts = asyncio.run(prepared(model().config, many, 70, 100, thread))
    assert len(decoded) == len(counts) == 2
    assert sum(counts) > 100


def test_the_number_of_pictures_is_limited(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match=f"at most {MAX_PICTURES} are taken"):
        ask(server, [part(PNG)] * (MAX_PICTURES + 1))


def test_a_placeholder_in_the_text_is_no_picture(server: Running) -> None:
    alone = ask(server, [part(PNG), {"type": "text", "text": ""}])
    beside = ask(server, [part(PNG), {"type": "text", "text": "<|image|>"}])
    assert 0 < beside.usage.prompt_tokens - alone.usage.prompt_tokens < 10  # of text


def test_a_picture_counts_against_the_context() -> None:
    refused = pytest.raises(openai.BadRequestError, match="at most 292 are taken")
    with running(ScriptedEngine(), max_context=300) as server, refused:
        ask(server, [part(PNG), part(PNG)])


def test_a_template_without_pictures_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer(), "chat_template", "{{ messages[0]['role'] }}")
    raises = pytest.raises(openai.BadRequestError, match="takes no pictures")
    with running(ScriptedEngine()) as server, raises as refused:
        ask(server, [QUESTION, part(PNG)])
    assert refused.value.param == "messages[0].content[1].image_url"


def test_the_template_with_tools_takes_pictures_as_the_models_own() -> None:
    content = [{"type": "image"}, {"type": "text", "text": " What is this? "}, {"type": "image"}]
    for thinking in (False, True):
        prompts = [
            encode_chat(teller, [{"role": "user", "content": content}], thinking=thinking)
            for teller in (tokenizer(), text_with_tools().tokenizer)
        ]
        assert prompts[0] == prompts[1]
        assert prompts[0].count(model().config.image_token_id) == 2


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_damaged_files_are_refused_and_never_crash(kind: str) -> None:
    """Every reading ends in a picture or an InputError."""
    whole, chance = encoded(picture(), kind), random.Random(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            read(data_url(bytes(data[: chance.randint(1, 2 * len(data))]), kind))
        except InputError:
            refused += 1
    assert 50 < refused < 300


def test_a_request_of_the_size_limit_is_taken_and_a_larger_one_is_not() -> None:
    engine = ScriptedEngine()
    engine.free = True
    with running(engine) as server:
        noise = encoded(Image.effect_noise((1500, 1300), 90))
        assert 1 << 20 < len(noise) < MAX_BYTES
        assert ask(server, [part(data_url(noise))]).choices[0].finish_reason
        body = {"messages": "x" * (8 << 20)}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 413


@pytest.mark.parametrize(
    ("kind", "way_out"),
    [("video_url", "frames as image_url"), ("input_audio", "said as text"), ("file", "their text")],
)
def test_other_media_are_refused_by_name_with_a_way_out(
    server: Running, kind: str, way_out: str
) -> None:
    """transformers' DiffusionGemma says that it supports neither video nor audio."""
    with pytest.raises(openai.BadRequestError) as error:
        ask(server, [QUESTION, {"type": kind, kind: {"url": "data:video/mp4;base64,AAAA"}}])
    assert error.value.code == "unsupported_content"
    assert error.value.message.count(f"{kind}: not supported: ") == 1
    assert way_out in error.value.message
    assert error.value.param.startswith("messages[0].content")


def test_an_unknown_part_is_refused_too(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="'telepathy'"):
        ask(server, [{"type": "telepathy"}])
