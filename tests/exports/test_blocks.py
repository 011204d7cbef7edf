"""NVFP4's blocks as the `gguf` package reads them."""

import gguf
import torch
from fused_dequant.formats import FP8, GROUP, unpack_e2m1

from quantize.exports.tensors import nvfp4_blocks

NVFP4 = gguf.GGMLQuantizationType.NVFP4


def test_nvfp4_reads_back_as_every_code_times_every_block_scale():
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(960, generator=generator)
    packed = (torch.arange(960) % 256).to(torch.uint8)[order].view(5, 3, 64)  # every pair of codes
    scales = torch.arange(1, 127, dtype=torch.uint8).repeat(2)[: 5 * 3 * 8].view(5, 3, 8)
    scales[0, 0, 0] = 0  # a zero scale is zero there too
    blocks = nvfp4_blocks(packed, scales.view(FP8)).numpy().reshape(15, -1)
    found = gguf.quants.dequantize(blocks, NVFP4)
    values = unpack_e2m1(packed).view(15, -1, GROUP) * scales.view(FP8).float().view(15, -1, 1)
    assert torch.equal(torch.from_numpy(found), values.view(15, -1))


def test_nvfp4_keeps_code_and_scale_bits():
    packed = torch.arange(32, dtype=torch.uint8).view(1, 32)
    scales = torch.tensor([[1, 2, 3, 126]], dtype=torch.uint8)
    block = nvfp4_blocks(packed, scales.view(FP8))
    assert block[:4].tolist() == [1, 2, 3, 126]
    codes = torch.stack((packed & 0xF, packed >> 4), -1).view(4, 16)
    stored = block[4:].view(4, 8)
    assert torch.equal(stored & 0xF, codes[:, :8])  # byte j holds values j and j + 8
    assert torch.equal(stored >> 4, codes[:, 8:])
