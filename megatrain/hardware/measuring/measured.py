"""measured_figures(): the figures of a machine, measured now or read from the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from megatrain.checks import PATH, Rule, checked, optional
from megatrain.device import Device
from megatrain.device.kinds import usable
from megatrain.hardware.measuring.cache import cached
from megatrain.hardware.measuring.copies import Link
from megatrain.hardware.measuring.host_updates import Update
from megatrain.hardware.measuring.kernels_alone import (
    DTYPES,
    Product,
    attention_rates,
    launch_s,
    memory_rate,
    op_s,
    product_rates,
    wake_s,
)
from megatrain.hardware.measuring.timing import Beside, seconds_of
from megatrain.memory.processors import update_threads
from megatrain.tracer.given import DEVICE

_MOST = 1 << 31


def _products_fault(value: Any) -> str | None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return "is not a list of products"
    for product in value:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(product, tuple) or len(product) not in (3, 4):  # pyright: ignore[reportUnknownArgumentType]
            return "has something that isn't (rows, inner, columns) or (rows, inner, columns, rate)"
        if any(type(size) is not int or not 0 < size < _MOST for size in product[:3]):  # pyright: ignore[reportUnknownVariableType]
            return "has a product with a size that is no count"
        if product[3:] and product[3] not in DTYPES:
            return f"has a product whose rate is none of {', '.join(DTYPES)}"
    return None


PRODUCTS = Rule("a list of (rows, inner, columns, rate)", '{name}=[(2048, 4096, 4096, "bf16")]', _products_fault)


@checked(device=optional(DEVICE), products=PRODUCTS, cache=optional(PATH))
def measured_figures(
    device: Device | torch.device | str | None,
    products: Sequence[Any],
    cache: str | os.PathLike[str] | None,
    fresh: bool,
    *,
    accept: Callable[..., object],
) -> dict[str, Any]:
    """The figures of a machine, as `accept` takes them; see `Hardware.measure`."""
    place = usable(device)
    wanted = [Product(*product) for product in products]
    facts = [place.described(), f"torch {torch.__version__}", f"{torch.get_num_threads()} threads", str(wanted)]
    folder = Path.home() / ".cache" / "megatrain" if cache is None else Path(cache)
    measure: Callable[[], Mapping[str, Any]] = partial(_measured, place, wanted)
    figures = dict(cached(folder, "; ".join(facts), measure, accept=accept, fresh=fresh))
    names = [name for name, value in figures.items() if value is not None and name != "name"]
    return {**figures, "origins": dict.fromkeys(names, "measured")}


def _measured(device: Device, products: Sequence[Product]) -> dict[str, Any]:
    # As many as a training step gives its updates; where the host computes, blocks and updates have torch's.
    threads = torch.get_num_threads() if device.is_host else update_threads(device.launching_threads)
    update = Update(threads)
    with ThreadPoolExecutor(1) as host_stream:
        # As in a training step: with more threads than processors, OpenMP lets those that wait sleep at once.
        host_stream.submit(update).result()
        figures = _of_kernels(device, products)
    link = Link(device)
    try:
        figures |= _of_link(device, link)
        figures |= _of_host(device, link, update)
    finally:
        link.close()
        device.empty_cache()  # segments that are larger than a model's tensors would hold these
    return figures


def _of_kernels(device: Device, products: Sequence[Product]) -> dict[str, Any]:
    woken = wake_s() if device.is_host else 0.0
    rates = product_rates(device, products, woken)
    launched, issued = launch_s(device)
    return {
        "name": str(device),
        "flops_per_s": {**rates, **attention_rates(device, rates)},
        "memory_bytes_per_s": memory_rate(device, launched + woken),
        "memory_bytes": device.memory().total,
        "host_memory_bytes": psutil.virtual_memory().total,
        "cores": update_threads(leave=0),
        "launch_s": launched,
        "issue_s": issued,
        "op_s": op_s(),
        "wake_s": woken,
    }


def _of_link(device: Device, link: Link) -> dict[str, Any]:
    h2d, d2h = link.alone()
    h2d_both, d2h_both = link.both()
    return {
        "h2d_bytes_per_s": h2d,
        "d2h_bytes_per_s": d2h,
        "h2d_beside": min(1.0, h2d_both / h2d),
        "d2h_beside": min(1.0, d2h_both / d2h),
        "pageable_bytes_per_s": None if device.is_host else link.pageable(),
    }


def _of_host(device: Device, link: Link, update: Update) -> dict[str, Any]:
    """Updates alone, updates beside copies, and where the host computes, compute beside updates and copies."""
    alone = update.rate(0.15)

    def copies() -> None:
        link.to_device()
        link.to_host()
        device.synchronize()

    with Beside(copies):
        beside = update.rate(0.15)
    figures: dict[str, Any] = {"host_bytes_per_s": alone, "host_beside": min(1.0, beside / alone)}
    if device.is_host:
        x = torch.ones(512, 512)
        product_s = seconds_of(device, lambda: x @ x, least_s=0.1)
        with Beside(copies):
            slowed_s = seconds_of(device, lambda: x @ x, least_s=0.2)
        figures["compute_beside"] = min(1.0, product_s / slowed_s)
    return figures
