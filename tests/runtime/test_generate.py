"""The runtime against transformers' own generate(), and a sample against its batch-mates."""

from dataclasses import replace

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.errors import InputError
from quantize.runtime import Sample, Sampler, StepRecord, generate
from quantize.runtime.prompt.images import Images
from tests.support.modules_oracle.engine import ModelEngine, generate_as_heard
from tests.support.modules_oracle.noise import Heard, heard
from tests.support.modules_oracle.passes import decode_canvas, encode_prompts, encode_tokens
from tests.support.tiny import CANVAS, VOCAB, tiny_model

# A stop threshold that random weights reach now and then (their mean entropy is 3.8 to 5.5 nats), and
# no demand for stability: rows stop at different steps.
STOPPING = Sampler(
    max_denoising_steps=6, eos_token_ids=(1, 106, 50), pad_token_id=0,
    stability_threshold=0, confidence_threshold=4.5, entropy_bound=4.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> DiffusionGemmaForBlockDiffusion:
    """Float64 with eager experts: grouped_mm has no float64."""
    built = tiny_model().double()
    built.set_experts_implementation("eager")
    return built


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(110, 480, (n,), generator=generator).tolist() for n in lengths]


def transformers_generate(
    model: DiffusionGemmaForBlockDiffusion,
    prompts: list[list[int]],
    canvases: int,
    s: Sampler,
    **images: torch.Tensor,
) -> tuple[list[list[int]], list[float], Heard]:
    """Its new tokens, tokens a forward and what it drew."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
        EntropyBoundSamplerConfig,
    )

    with heard(len(prompts)) as noise:
        output = model.generate(
            torch.tensor(prompts),
            max_new_tokens=canvases * CANVAS,
            max_denoising_steps=s.max_denoising_steps,
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=s.entropy_bound),
            t_min=s.t_min,
            t_max=s.t_max,
            stability_threshold=s.stability_threshold,
            confidence_threshold=s.confidence_threshold,
            eos_token_id=list(s.eos_token_ids) or None,
            pad_token_id=s.pad_token_id,
            **images,
        )
    new = output.sequences[:, len(prompts[0]) :].tolist()
    return new, output.tokens_per_forward.tolist(), noise


def flat(sample: Sample) -> list[int]:
    return [token for canvas in sample.committed for token in canvas]


# Prompts shorter and longer than the sliding window of 32; one and several canvases; batches.
@pytest.mark.parametrize(
    ("length", "batch", "canvases"), [(5, 1, 3), (31, 1, 2), (50, 1, 3), (20, 4, 2), (40, 3, 2)]
)
def test_reference_noise_gives_the_tokens_of_transformers(
    model: DiffusionGemmaForBlockDiffusion, length: int, batch: int, canvases: int
) -> None:
    """With seeds until one stops early: on which one it does depends on the CPU."""
    stopped_early = 0
    for seed in range(20):
        if stopped_early:
            break
        prompts = random_prompts([length] * batch, seed)
        torch.manual_seed(seed)
        expected, per_forward, noise = transformers_generate(model, prompts, canvases, STOPPING)
        got = generate_as_heard(
            model, prompts, noise, max_new_tokens=canvases * CANVAS, sampler=STOPPING
        )
        for row, sample in enumerate(got):
            width = len(flat(sample))
            assert flat(sample) == expected[row][:width]
            assert all(token == 0 for token in expected[row][width:])
            assert sample.tokens_per_forward == pytest.approx(per_forward[row])
            stopped_early += sum(n < STOPPING.max_denoising_steps for n in sample.steps_per_canvas)
    assert stopped_early > 0  # else the stop rule was not exercised


def test_rows_that_left_change_nothing_for_the_others(
    model: DiffusionGemmaForBlockDiffusion,
) -> None:
    """In transformers they stay, re-read padding and draw until the last row has stopped."""
    often = replace(STOPPING, eos_token_ids=tuple(range(1, 8)), confidence_threshold=4.6)
    finished_before_others = 0
    for seed in range(6):
        if finished_before_others:
            break
        prompts = random_prompts([20] * 3, seed)
        torch.manual_seed(seed)
        expected, _, noise = transformers_generate(model, prompts, 6, often)
        got = generate_as_heard(model, prompts, noise, max_new_tokens=6 * CANVAS, sampler=often)
        for row, sample in enumerate(got):
            assert flat(sample) == expected[row][: len(flat(sample))]
        finished_before_others += len({sample.canvases for sample in got}) > 1
    assert finished_before_others > 0


def prompt_with_images(
    model: DiffusionGemmaForBlockDiffusion, before: int, after: int
) -> list[int]:
    """Text, two images of four soft tokens each, text."""
    config = model.config
    image = [config.boi_token_id, *[config.image_token_id] * 4, config.eoi_token_id]
    first, last = random_prompts([before, after])
    return [*first, *image, *image, *last]


def two_images(seed: int = 0) -> Images:
    """4 x 4 patches of 48 values each; the tower pools 2 x 2 of them to a token."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy")
    positions = torch.stack([x.flatten(), y.flatten()], -1).expand(2, -1, -1)
    return Images(torch.rand(2, 16, 48, generator=generator, dtype=torch.float64), positions)


@pytest.mark.parametrize(("before", "after"), [(3, 6), (10, 40)])  # the window is 32
def test_images_give_the_tokens_of_transformers(
    model: DiffusionGemmaForBlockDiffusion, before: int, after: int
) -> None:
    prompt = prompt_with_images(model, before, after)
    answers: list[list[int]] = []
    for seed in range(2):
        images = two_images(seed)
        torch.manual_seed(7)
        is_image = torch.tensor([prompt]) == model.config.image_token_id
        expected, _, noise = transformers_generate(
            model, [prompt], 2, STOPPING, pixel_values=images.pixels,
            image_position_ids=images.positions, mm_token_type_ids=is_image.long(),
        )  # fmt: skip
        got = generate_as_heard(
            model, [prompt], noise, max_new_tokens=2 * CANVAS, sampler=STOPPING, images=[images]
        )
        assert flat(got[0]) == expected[0][: len(flat(got[0]))]
        answers.append(flat(got[0]))
    assert answers[0] != answers[1]  # the images are seen


def test_images_and_placeholders_must_fit(model: DiffusionGemmaForBlockDiffusion) -> None:
    prompt, images = prompt_with_images(model, 3, 3), two_images()
    arguments = {"max_new_tokens": CANVAS, "sampler": STOPPING}
    for tokens, given, message in (
        ([5, 6], images, "images and no placeholder"),
        (prompt, None, "an image placeholder and no image"),
        ([*prompt[:-7], 5], images, "do not fit"),
    ):
        with pytest.raises(InputError, match=message):
            generate(ModelEngine(model), [tokens], [0], images=[given], **arguments)


def test_default_sampler_gives_the_tokens_of_transformers(
    model: DiffusionGemmaForBlockDiffusion,
) -> None:
    prompts = random_prompts([24])
    sampler = Sampler(max_denoising_steps=6)
    torch.manual_seed(3)
    expected, _, noise = transformers_generate(model, prompts, 2, sampler)
    got = generate_as_heard(model, prompts, noise, max_new_tokens=2 * CANVAS, sampler=sampler)
    assert flat(got[0]) == expected[0]
    assert got[0].steps_per_canvas == [6, 6]
    assert got[0].finish == "length"


def test_a_sample_does_not_depend_on_its_batch(model: DiffusionGemmaForBlockDiffusion) -> None:
    prompts = random_prompts([3, 40, 17, 70])
    seeds = [5, 2**40 + 1, -7, 99]
    together = generate(
        ModelEngine(model), prompts, seeds, max_new_tokens=2 * CANVAS, sampler=STOPPING
    )
    alone = [
        generate(ModelEngine(model), [p], [s], max_new_tokens=2 * CANVAS, sampler=STOPPING)[0]
        for p, s in zip(prompts, seeds, strict=True)
    ]
    assert together == alone
    assert len({tuple(sample.steps_per_canvas) for sample in alone}) > 1  # rows left at other times
    shuffled = generate(
        ModelEngine(model), prompts[::-1], seeds[::-1], max_new_tokens=2 * CANVAS, sampler=STOPPING
    )
    assert shuffled == together[::-1]


def test_ragged_logits_equal_unpadded_logits_in_float32() -> None:
    model = tiny_model().float()
    prompts = random_prompts([3, 40, 17, 70])
    generator = torch.Generator().manual_seed(1)
    first, canvas = torch.randint(0, VOCAB, (2, 4, CANVAS), generator=generator)
    ragged = encode_tokens(model, encode_prompts(model, prompts), first)
    together = decode_canvas(model, ragged, canvas, None)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt + first[row].tolist()])
        with torch.no_grad():
            expected = model(input_ids=ids, decoder_input_ids=canvas[row : row + 1]).logits[0]
        torch.testing.assert_close(together[row], expected, rtol=1e-4, atol=1e-4)


def test_seed_and_step_records(model: DiffusionGemmaForBlockDiffusion) -> None:
    prompts = random_prompts([9, 12])
    records: list[StepRecord] = []
    one = generate(
        ModelEngine(model),
        prompts,
        [1, 2],
        max_new_tokens=CANVAS,
        sampler=STOPPING,
        on_step=records.append,
    )
    assert one == generate(
        ModelEngine(model), prompts, [1, 2], max_new_tokens=CANVAS, sampler=STOPPING
    )
    assert one != generate(
        ModelEngine(model), prompts, [1, 3], max_new_tokens=CANVAS, sampler=STOPPING
    )
    for row, sample in enumerate(one):
        mine = [record for record in records if row in record.rows]
        assert [record.step for record in mine] == list(range(1, sample.denoising_steps + 1))
        last = mine[-1]
        committed = last.argmax[last.rows.index(row)].tolist()
        assert sample.tokens == committed[: len(sample.tokens)]
    assert all(record.accepted.any(-1).all() for record in records)


def test_eos_trims_and_pads() -> None:
    sample = Sample()
    sample.commit([7, 8, 9], 4, STOPPING)
    sample.commit([7, 106, 9], 2, STOPPING)
    assert sample.tokens == [7, 8, 9, 7]
    assert sample.committed == [[7, 8, 9], [7, 106, 0]]
    assert (sample.finish, sample.new_tokens, sample.denoising_steps) == ("eos", 5, 6)


def test_max_length_limits_the_canvases_of_each_row(model: DiffusionGemmaForBlockDiffusion) -> None:
    sampler = Sampler(max_denoising_steps=2, max_length=60)
    got = generate(
        ModelEngine(model),
        random_prompts([10, 30]),
        [0, 1],
        max_new_tokens=10 * CANVAS,
        sampler=sampler,
    )
    assert [sample.canvases for sample in got] == [4, 2]  # ceil(50 / 16), ceil(30 / 16)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5], []], "prompt 1 is empty"),
        ([[5, VOCAB]], "outside the vocabulary"),
        ([[5, VOCAB - 1]], "image placeholder"),
        ([[5] * 4096], "nothing can follow"),
        ([], "0 prompts"),
    ],
)
def test_bad_prompts_are_refused(
    model: DiffusionGemmaForBlockDiffusion, prompts: list[list[int]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        generate(
            ModelEngine(model), prompts, [0] * len(prompts), max_new_tokens=16, sampler=Sampler()
        )
