"""The platform class behind `cpu_platform.activate`; SGLang loads this module only when it is selected."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms import interface
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum


class HicacheExtCpuPlatform(CpuDeviceMixin, interface.SRTPlatform):
    """A CPU that runs torch operators only: no AMX kernels, no Triton, no graphs, no pinned memory.

    It is out-of-tree (`OOT`) and not `CPU` because SGLang takes its in-tree CPU platform to have AMX kernels.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    # Releases before PlatformCapabilities assume as little by themselves, but want classes named.
    if hasattr(interface, "PlatformCapabilities"):
        capabilities = interface.PlatformCapabilities()
    else:

        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_mla_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

            return MLATokenToKVPool

        def get_paged_allocator_cls(self) -> type:
            from hicache_ext.integration.cpu_allocator_0_5_17 import paged_allocator

            return paged_allocator()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False
