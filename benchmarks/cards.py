"""Cards: how fast some GPUs and their hosts are, for steps in modelled time. Nothing here was measured by megatrain.

Products and copies in one direction are what users have published for these cards; of the RTX 3080 the maker's figure.
Memory is the maker's figure. Assumed are the part that layers reach, both directions at once, hosts, and host times.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulated_device.simulator import HardwareProfile

GIB = 1 << 30
# Of what a large product alone reaches, the part that layers reach.
_IN_LAYERS = 0.7
# Of a memory's rate on paper, the part that kernels reach.
_OF_MEMORY = 0.85


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU in a machine.

    Args:
        name: Printed.
        memory_bytes: Of the GPU.
        half_flops_per_s: Large products of bfloat16.
        fp32_flops_per_s: Likewise, of float32.
        memory_bytes_per_s: Of the GPU's memory, on paper.
        h2d_bytes_per_s: Copies to the device from page-locked memory.
        d2h_bytes_per_s: Copies from the device.
        both_ways: Part of both rates together that the link moves in both directions at once.
        host_bytes_per_s: What an update moves in host memory; a half to two thirds of the memory's rate on paper.
    """

    name: str
    memory_bytes: int
    half_flops_per_s: float
    fp32_flops_per_s: float
    memory_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    both_ways: float
    host_bytes_per_s: float

    def profile(self) -> HardwareProfile:
        """Rates for the simulated device. Python issues a kernel in 6 us, as PyTorch does on a fast processor."""
        return HardwareProfile(
            fp32=self.fp32_flops_per_s * _IN_LAYERS,
            tf32=self.fp32_flops_per_s * _IN_LAYERS,
            half=self.half_flops_per_s * _IN_LAYERS,
            memory=self.memory_bytes_per_s * _OF_MEMORY,
            launch=2e-6,
            h2d=self.h2d_bytes_per_s,
            d2h=self.d2h_bytes_per_s,
            pageable=self.h2d_bytes_per_s / 4,
            both_ways=self.both_ways,
            sync=5e-6,
            issue=6e-6,
            control=1.5e-6,
        )


CARDS = {
    card.name: card
    for card in (
        Card("RTX 3080", 10 * GIB, 59.5e12, 24e12, 0.76e12, 24e9, 24e9, 0.75, 30e9),
        Card("RTX 3090", 24 * GIB, 76e12, 24.5e12, 0.936e12, 25e9, 25e9, 0.75, 30e9),
        Card("RTX 4090", 24 * GIB, 165e12, 50e12, 1.008e12, 25e9, 25e9, 0.75, 50e9),
        Card("H100", 80 * GIB, 790e12, 51e12, 3.35e12, 55e9, 55e9, 0.8, 200e9),
        Card("H200", 141 * GIB, 790e12, 51e12, 4.8e12, 55e9, 55e9, 0.8, 200e9),
        Card("GH200", 96 * GIB, 829e12, 60e12, 4.0e12, 346e9, 300e9, 0.7, 300e9),
    )
}
