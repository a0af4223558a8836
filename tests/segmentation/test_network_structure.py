"""Networks against plain forms of their papers, which use every tensor of the weights by its name."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from brim.segmentation import create_model

SMALL, ADVANCED = (48, 96, 192, 384, 512, 1024), (64, 128, 256, 512, 1024)
CELLS, TINY = (16, 32, 64, 128, 256), (16, 32, 64)


class Weights(dict):
    """Tensors by name; which were used is counted."""

    def __init__(self, module):
        super().__init__({name: t for name, t in module.state_dict().items() if "num_batches" not in name})
        self.used = Counter()

    def __getitem__(self, name):
        self.used[name] += 1
        return super().__getitem__(name)

    def norm(self, name, x):
        values = (self[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *values)

    def conv(self, name, x, stride=1):
        """Convolution and norm."""
        kernel = self[f"{name}.conv.weight"]
        return self.norm(f"{name}.norm", F.conv2d(x, kernel, stride=stride, padding=kernel.shape[2] // 2))

    def mlp(self, name, x):
        for layer in (0, 2):
            x = F.linear(x if not layer else x.relu(), self[f"{name}.{layer}.weight"], self[f"{name}.{layer}.bias"])
        return x


def resized(x, like):
    return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)


def hrnet(w, images):
    x = w.conv("stem.1", w.conv("stem.0", images, 2).relu(), 2).relu()
    for block in range(4):
        at = f"stage1.{block}"
        y = w.conv(f"{at}.last", w.conv(f"{at}.body.1", w.conv(f"{at}.body.0", x).relu()).relu())
        x = (y + (x if block else w.conv(f"{at}.shortcut", x))).relu()
    branches = [w.conv("entries.0.0", x).relu(), w.conv("entries.0.1", x, 2).relu()]
    for stage, modules in enumerate((1, 4, 3)):
        branches += [w.conv(f"entries.{stage}.0", branches[-1], 2).relu()] if stage else []
        for module in range(modules):
            branches = exchanged(w, f"stages.{stage}.{module}", branches)
    assert [b.shape[1:] for b in branches] == [(48, 16, 24), (96, 8, 12), (192, 4, 6), (384, 2, 3)]
    joined = torch.cat([resized(branch, branches[0]) for branch in branches], 1)
    return F.conv2d(w.conv("head.mix", joined).relu(), w["head.score.weight"], w["head.score.bias"])


def exchanged(w, at, branches):
    """Four residual blocks on each branch; then each is the sum of all, brought to its resolution."""
    for number in range(len(branches)):
        for block in range(4):
            name, x = f"{at}.branches.{number}.{block}", branches[number]
            branches[number] = (w.conv(f"{name}.last", w.conv(f"{name}.first", x).relu()) + x).relu()
    sums = []
    for target, own in enumerate(branches):
        total = own
        for source, x in enumerate(branches):
            path = f"{at}.rows.{target}.{source}"
            if source > target:
                total = total + resized(w.conv(path, x), own)
            for step in range(target - source):
                last = step == target - source - 1
                x = w.conv(f"{path}.{step}", x, 2)
                x = x if last else x.relu()
            total = total + x if source < target else total
        sums.append(total.relu())
    return sums


def squeeze_excite(w, at, x, level):
    return x * torch.sigmoid(w.mlp(f"{at}.mlp", x.mean((2, 3))))[:, :, None, None]


def simam_or_cbam(w, at, x, level):
    if level < 2:
        away = (x - x.mean((2, 3), keepdim=True)).square()
        variance = away.sum((2, 3), keepdim=True) / (x.shape[2] * x.shape[3] - 1)
        return x * torch.sigmoid(away / (4 * (variance + 1e-4)) + 0.5)
    both = w.mlp(f"{at}.mlp", x.mean((2, 3))) + w.mlp(f"{at}.mlp", x.amax((2, 3)))
    return looked_at(w, f"{at}.spatial", x * torch.sigmoid(both)[:, :, None, None])


def looked_at(w, at, x):
    seen = torch.stack((x.mean(1), x.amax(1)), 1)
    return x * torch.sigmoid(F.conv2d(seen, w[f"{at}.conv.weight"], padding=3))


def attended(w, at, x):
    """Self-attention in heads of 64 channels."""
    pixels = x.flatten(2).transpose(1, 2)
    seen = F.layer_norm(pixels, pixels.shape[2:], w[f"{at}.norm.weight"], w[f"{at}.norm.bias"])
    heads = F.linear(seen, w[f"{at}.qkv.weight"], w[f"{at}.qkv.bias"]).view(*seen.shape[:2], 3, -1, 64)
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    found = torch.softmax(query @ key.transpose(-1, -2) / 8, -1) @ value
    found = F.linear(found.transpose(1, 2).flatten(2), w[f"{at}.out.weight"], w[f"{at}.out.bias"])
    return (pixels + found).transpose(1, 2).view(x.shape)


def resunet(w, images, widths, encoder, decoder, attention, bottleneck):
    """Full pre-activation units; a level is half as fine as the one before, and its skip passes an attention gate."""

    def units(at, x, num, level, stride=1):
        for unit in range(num):
            name, step = f"{at}.{unit}", stride if unit == 0 else 1
            y = w.conv(f"{name}.first", w.norm(f"{name}.enter.norm", x).relu(), step).relu()
            y = attention(w, f"{name}.attention", F.conv2d(y, w[f"{name}.last.weight"], padding=1), level)
            x = y + (w.conv(f"{name}.shortcut", x, step) if y.shape != x.shape else x)
        return x

    x, skips = F.conv2d(images, w["stem.weight"], padding=1), []
    for level, (width, num) in enumerate(zip(widths, encoder, strict=True)):
        x = units(f"encoder.{level}", x, num, level, 1 if level == 0 else 2)
        assert x.shape[1:] == (width, 64 >> level, 96 >> level)
        skips.append(x)
    x = bottleneck(w, "bottleneck", skips.pop())
    for place, level in enumerate(reversed(range(len(widths) - 1))):
        at, skip = f"decoder.{place}", skips.pop()
        half = F.conv2d(skip, w[f"{at}.gate.skip.weight"], stride=2)
        compared = half + F.conv2d(x, w[f"{at}.gate.gate.weight"], w[f"{at}.gate.gate.bias"])
        score = F.conv2d(compared.relu(), w[f"{at}.gate.score.weight"], w[f"{at}.gate.score.bias"])
        gated = skip * resized(torch.sigmoid(score), skip)
        x = torch.cat((resized(w.conv(f"{at}.reduce", x), skip), gated), 1)
        x = units(f"{at}.units", x, decoder[level], level)
    return F.conv2d(w.norm("norm.norm", x).relu(), w["score.weight"], w["score.bias"])


def plain(w, at, x, level=0):
    return x


FORMS = {
    "hrnet": hrnet,
    "resunet_small": lambda w, x: resunet(w, x, SMALL, (1, 1, 1, 1, 1, 2), (1,) * 5, squeeze_excite, looked_at),
    "resunet_advanced": lambda w, x: resunet(w, x, ADVANCED, (2, 2, 2, 3, 2), (2, 2, 2, 3), simam_or_cbam, attended),
    "unet_tiny": lambda w, x: resunet(w, x, TINY, (1,) * 3, (1,) * 2, plain, plain),
    "cells": lambda w, x: resunet(w, x, CELLS, (1,) * 5, (1,) * 4, plain, plain),
}


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_a_network_has_the_structure_of_its_paper(name):
    torch.manual_seed(3)
    module = create_model(name).eval()
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):  # so that no two maps are alike
            torch.nn.init.uniform_(layer.running_var, 0.5, 1.5)
            torch.nn.init.normal_(layer.bias, 0, 0.2)
    weights, images = Weights(module), torch.randn(1, 3, 64, 96)

    wanted = resized(FORMS[name](weights, images), images)

    assert set(weights.used) == set(weights)
    torch.testing.assert_close(module(images), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
    assert wanted.std() > 0.01
