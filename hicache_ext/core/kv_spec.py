"""Registry of the KV structures of SGLang: what each is made of, what can be reused from it, what is carried.

A pool class is known by its exact name and module. A subclass changes the layout behind the same attributes,
and a class that a release adds is unproven, so anything that is not listed here is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

RELEASES = ("0.5.17", "0.5.23")

DROP_FLAG = "start without --enable-hicache-ext"


class Role(StrEnum):
    """What a class is for; it decides how many of its kind a model may have."""

    KV = "KV pool"
    STATE = "state pool"
    TABLE = "request table"
    ALLOCATOR = "slot allocator"
    BASE = "abstract base"


class Reuse(StrEnum):
    """Where a prefix may end that is reused from a structure."""

    ANY_PAGE = "at any page"
    CHECKPOINT = "only at a kept checkpoint"
    WINDOW = "only where the window before it is kept"
    NEVER = "never"


@dataclass(frozen=True)
class PoolClass:
    """One class of SGLang; ``module`` is below ``sglang.srt``."""

    name: str
    module: str
    role: Role = Role.KV
    releases: tuple[str, ...] = RELEASES

    @property
    def full_module(self) -> str:
        return f"sglang.srt.{self.module}"


@dataclass(frozen=True)
class Kind:
    """One KV structure.

    Attributes:
        key: short name for programs.
        title: name for people, lower case.
        reuse: at which boundaries a prefix can be reused.
        page: what one page of it is made of.
        carried: whether this package moves it between tiers.
        reason: why not, or how if it is carried; one sentence without a full stop.
        cure: what the user can do; empty if it is carried.
        classes: the classes that hold it.
        shares: names of classes of another kind that hold this one too.
    """

    key: str
    title: str
    reuse: Reuse
    page: str
    carried: bool
    reason: str
    cure: str = DROP_FLAG
    classes: tuple[PoolClass, ...] = ()
    shares: tuple[str, ...] = ()


_OLD = ("0.5.17",)
_NEW = ("0.5.23",)

_POOL = "mem_cache.memory_pool"
_V4 = "mem_cache.deepseek_v4_memory_pool"
_UNIFIED = "mem_cache.unified_memory_pool"
_INTERLEAVE = "mem_cache.page_interleave_pool"
_NPU = "hardware_backend.npu.memory_pool_npu"
_NPU_V4 = "hardware_backend.npu.dsv4.dsv4_memory_pool"
_NPU_V4_REQ = "hardware_backend.npu.dsv4.dsv4_req_to_token_pool"
_MLX_KV = "hardware_backend.mlx.kv_cache.attention_kv_cache"
_MLX_STATE = "hardware_backend.mlx.kv_cache.auxiliary_state"
_HISPARSE = "mem_cache.allocator.hisparse"
_SWA_ALLOC = "mem_cache.allocator.swa"
_UNIFIED_SWA_ALLOC = "mem_cache.allocator.unified_hybrid_swa"
_SUB_POOL_ALLOC = "mem_cache.allocator.unified_sub_pool"
_OLD_UNIFIED_ALLOC = "mem_cache.multi_ended_allocator"
_DECODE = "disaggregation.decode"


KINDS: tuple[Kind, ...] = (
    Kind(
        key="mha",
        title="full attention (MHA, GQA, MQA)",
        reuse=Reuse.ANY_PAGE,
        page="per layer K [token][KV head][dim] and V [token][KV head][value dim]",
        carried=True,
        reason="K and V rows of every layer, split into groups of KV heads; fp8 rows too",
        cure="",
        classes=(PoolClass("MHATokenToKVPool", _POOL),),
    ),
    Kind(
        key="mla",
        title="multi-head latent attention (MLA)",
        reuse=Reuse.ANY_PAGE,
        page="per layer one latent row [token][rank + rotary dim], the same on every TP rank",
        carried=True,
        reason="one latent row a token and layer, in one group",
        cure="",
        classes=(PoolClass("MLATokenToKVPool", _POOL),),
    ),
    Kind(
        key="sliding-window",
        title="sliding-window attention",
        reuse=Reuse.WINDOW,
        page="two pools: K and V of the full layers; K and V of the window layers, only the last window",
        carried=False,
        reason="the window layers' pool has slots of its own and drops what lies before the window",
        cure=f"{DROP_FLAG}, or keep all tokens of all layers with --disable-hybrid-swa-memory",
        classes=(
            PoolClass("SWAKVPool", "mem_cache.swa_memory_pool"),
            PoolClass("SWATokenToKVPoolAllocator", _SWA_ALLOC, Role.ALLOCATOR),
            PoolClass("PureSWATokenToKVPoolAllocator", _SWA_ALLOC, Role.ALLOCATOR),
        ),
    ),
    Kind(
        key="chunked-local",
        title="chunked local attention",
        reuse=Reuse.WINDOW,
        page="as sliding window; a token sees back to the start of its chunk only",
        carried=False,
        reason="its local layers live in a sliding-window pool",
        cure=f"{DROP_FLAG}, or keep all tokens of all layers with --disable-hybrid-swa-memory",
        shares=("SWAKVPool",),
    ),
    Kind(
        key="ssm",
        title="SSM and convolution state",
        reuse=Reuse.CHECKPOINT,
        page="none: one recurrent and one convolution state a layer and request, overwritten by every token; "
        "attention layers beside it have pages",
        carried=False,
        reason="a state exists only where a checkpoint of it was kept, and checkpoints are not carried",
        classes=(
            PoolClass("MambaPool", _POOL, Role.STATE),
            PoolClass("HybridLinearKVPool", _POOL),
            PoolClass("HybridReqToTokenPool", _POOL, Role.TABLE),
            PoolClass("HybridMambaDecodeReqToTokenPool", _DECODE, Role.TABLE),
            PoolClass("MambaCheckpointPool", "mem_cache.mamba_checkpoint_pool", Role.STATE),
            PoolClass("ShortConvPool", "mem_cache.ple_state_pool", Role.STATE, _NEW),
            PoolClass("NGramPool", "mem_cache.ple_state_pool", Role.STATE, _NEW),
            PoolClass("MambaSlotAllocator", "mem_cache.allocator.mamba", Role.ALLOCATOR),
        ),
    ),
    Kind(
        key="linear-attention",
        title="linear-attention state (GDN, KDA, lightning)",
        reuse=Reuse.CHECKPOINT,
        page="none: one state matrix a head, layer and request, overwritten by every token",
        carried=False,
        reason="a state exists only where a checkpoint of it was kept, and checkpoints are not carried",
        shares=("MambaPool", "HybridLinearKVPool", "HybridReqToTokenPool"),
    ),
    Kind(
        key="sparse-index",
        title="sparse-attention index keys (DSA, MiniMax, QSA)",
        reuse=Reuse.ANY_PAGE,
        page="beside K and V or the latent: index keys, some with scales, packed a page at a time",
        carried=False,
        reason="without its index keys a reused page is never selected by the sparse attention, silently",
        classes=(
            PoolClass("DSATokenToKVPool", _POOL),
            PoolClass("LayerSplitDSATokenToKVPool", "mem_cache.dsa_cache_layer_split"),
            PoolClass("MHATokenToKOnlyPool", _POOL),
            PoolClass("MiniMaxSparseKVPool", _POOL),
            PoolClass("QSATokenToKVPool", "mem_cache.qsa_kv_pool", releases=_NEW),
        ),
    ),
    Kind(
        key="quantized",
        title="quantized KV with scales (FP4, MXFP8, NVFP4)",
        reuse=Reuse.ANY_PAGE,
        page="packed values and, in separate buffers or in the same row, their scales",
        carried=False,
        reason="its scales lie in buffers of their own or are packed with the values",
        cure=f"{DROP_FLAG}, or give --kv-cache-dtype auto or fp8_e4m3",
        classes=(
            PoolClass("MHATokenToKVPoolFP4", _POOL),
            PoolClass("MLATokenToKVPoolFP4", _POOL),
            PoolClass("MHATokenToKVPoolMXFP8", _POOL),
            PoolClass("MiniMaxM3Nvfp4IndexKPool", "mem_cache.minimax_m3_nvfp4_pool", releases=_NEW),
            PoolClass("MiniMaxM3Nvfp4MainKVPool", "mem_cache.minimax_m3_nvfp4_pool", releases=_NEW),
            PoolClass("MiniMaxM3Nvfp4KVPool", "mem_cache.minimax_m3_nvfp4_pool", releases=_NEW),
        ),
    ),
    Kind(
        key="draft",
        title="KV of a draft model (speculative decoding)",
        reuse=Reuse.ANY_PAGE,
        page="K and V or latent rows of the draft's layers, at the target's slots or fused into its pages",
        carried=False,
        reason="the target's KV would come back without the draft's, and acceptance would fall silently",
        cure=f"drop --speculative-algorithm, or {DROP_FLAG}",
        classes=(
            PoolClass("UnifiedDraftKVPool", "mem_cache.unified_draft_pool", releases=_NEW),
            PoolClass("UnifiedDraftSWAKVPool", "mem_cache.unified_draft_pool", releases=_NEW),
            PoolClass("UnifiedDraftMambaPool", "mem_cache.unified_draft_pool", Role.STATE, _NEW),
        ),
        shares=("MHATokenToKVPool", "MLATokenToKVPool"),
    ),
    Kind(
        key="compressed",
        title="compressed KV and state (DeepSeek-V4)",
        reuse=Reuse.WINDOW,
        page="compressed rows of several ratios, their index keys, a window of raw rows, a compressor state",
        carried=False,
        reason="its five parts have pages of different length, and two of them hold only the last tokens",
        classes=(
            PoolClass("DeepSeekV4TokenToKVPool", _V4),
            PoolClass("DeepSeekV4SingleKVPool", _V4),
            PoolClass("DeepSeekV4UniformFP8KVPool", _V4, releases=_NEW),
            PoolClass("DeepSeekV4IndexerPool", _V4),
            PoolClass("DeepSeekV4UnifiedKVPool", _V4),
            PoolClass("CompressStatePool", "mem_cache.deepseek_v4_compress_state", Role.STATE),
        ),
    ),
    Kind(
        key="cross-attention",
        title="encoder cross-attention",
        reuse=Reuse.NEVER,
        page="K and V of the encoder's output, in slots of the same pool before the decoder's",
        carried=False,
        reason="it depends on the image or audio of the request, which the token ids do not name",
        shares=("MHATokenToKVPool",),
    ),
    Kind(
        key="page-major",
        title="page-major layout",
        reuse=Reuse.ANY_PAGE,
        page="all layers of a page side by side, in one buffer",
        carried=False,
        reason="its buffers have the shape of plain K and V and another order",
        cure=f"drop --enable-page-major-kv-layout, or {DROP_FLAG}",
        classes=(PoolClass("PageMajorMHATokenToKVPool", _POOL),),
    ),
    Kind(
        key="page-interleaved",
        title="pages interleaved over ranks",
        reuse=Reuse.ANY_PAGE,
        page="of the pages of a prompt, each rank of a group holds every n-th",
        carried=False,
        reason="a rank holds only its share of the pages of a prefix",
        cure=f"drop the flag that shards KV by pages, or {DROP_FLAG}",
        classes=(
            PoolClass("PageInterleaveKVPoolMixin", _INTERLEAVE, Role.BASE, _NEW),
            PoolClass("PageInterleaveMHATokenToKVPool", _INTERLEAVE, releases=_NEW),
            PoolClass("PageInterleaveMLATokenToKVPool", _INTERLEAVE, releases=_NEW),
            PoolClass("PageInterleaveDSATokenToKVPool", _INTERLEAVE, releases=_NEW),
            PoolClass(
                "PageInterleavePoolAllocator", "mem_cache.allocator.page_interleave", Role.ALLOCATOR, _NEW
            ),
        ),
    ),
    Kind(
        key="unified-memory",
        title="unified memory pool",
        reuse=Reuse.ANY_PAGE,
        page="as the structure it holds, in an envelope of one shared byte buffer",
        carried=False,
        reason="slots are virtual and compaction moves pages under the cache",
        cure=f"drop --enable-unified-memory, or {DROP_FLAG}",
        classes=(
            PoolClass("UnifiedKVPool", _UNIFIED),
            PoolClass("UnifiedMHATokenToKVPool", _UNIFIED),
            PoolClass("UnifiedMLATokenToKVPool", _UNIFIED),
            PoolClass("UnifiedSWAKVPool", _UNIFIED),
            PoolClass("UnifiedHybridLinearKVPool", _UNIFIED, releases=_NEW),
            PoolClass("UnifiedMambaPool", _UNIFIED, Role.STATE),
            PoolClass("UnifiedHybridReqToTokenPool", _UNIFIED, Role.TABLE),
            PoolClass("UnifiedMambaSlotAllocator", _UNIFIED, Role.ALLOCATOR),
            PoolClass("UnifiedSWAAllocatorBase", _UNIFIED_SWA_ALLOC, Role.BASE, _NEW),
            PoolClass("UnifiedSWATokenToKVPoolAllocator", _UNIFIED_SWA_ALLOC, Role.ALLOCATOR, _NEW),
            PoolClass("UnifiedMambaSWATokenToKVPoolAllocator", _UNIFIED_SWA_ALLOC, Role.ALLOCATOR, _NEW),
            PoolClass(
                "UnifiedMambaTokenToKVPoolAllocator",
                "mem_cache.allocator.unified_mamba",
                Role.ALLOCATOR,
                _NEW,
            ),
            PoolClass("MultiEndedAllocator", _SUB_POOL_ALLOC, Role.ALLOCATOR, _NEW),
            PoolClass("FloatMultiEndedAllocator", _SUB_POOL_ALLOC, Role.ALLOCATOR, _NEW),
            PoolClass("MultiEndedAllocator", _OLD_UNIFIED_ALLOC, Role.ALLOCATOR, _OLD),
            PoolClass("UnifiedMambaTokenToKVPoolAllocator", _OLD_UNIFIED_ALLOC, Role.ALLOCATOR, _OLD),
            PoolClass("UnifiedSWATokenToKVPoolAllocator", _OLD_UNIFIED_ALLOC, Role.ALLOCATOR, _OLD),
        ),
    ),
    Kind(
        key="hisparse",
        title="hierarchical sparse KV (HiSparse)",
        reuse=Reuse.ANY_PAGE,
        page="sparse KV whose device slots are a cache of a host copy that SGLang keeps itself",
        carried=False,
        reason="its device slots hold only what the sparse attention has picked last",
        cure=f"drop --enable-hisparse, or {DROP_FLAG}",
        classes=(
            PoolClass("HiSparseDSATokenToKVPool", "mem_cache.hisparse_memory_pool"),
            PoolClass("HiSparseMHAMainPool", "mem_cache.hisparse_memory_pool", releases=_NEW),
            PoolClass("HiSparseC4DevicePool", _V4),
            PoolClass("HiSparseTokenToKVPoolAllocator", _HISPARSE, Role.ALLOCATOR),
            PoolClass("DeepSeekV4HiSparseTokenToKVPoolAllocator", _HISPARSE, Role.ALLOCATOR),
        ),
    ),
    Kind(
        key="none",
        title="no KV",
        reuse=Reuse.NEVER,
        page="none: attention uses the K and V of the running prompt only",
        carried=False,
        reason="nothing is kept, so nothing can be reused",
        cure=f"{DROP_FLAG}; this server gains nothing from a prefix cache",
        classes=(PoolClass("NoOpMHATokenToKVPool", _POOL),),
    ),
    Kind(
        key="npu",
        title="Ascend NPU variants",
        reuse=Reuse.ANY_PAGE,
        page="as the structure of the same name, in the NPU kernels' own page layout",
        carried=False,
        reason="there is no copy backend for this device, and its buffers are ordered for its own kernels",
        classes=(
            PoolClass("NPUMHATokenToKVPool", _NPU),
            PoolClass("NPUMLATokenToKVPool", _NPU),
            PoolClass("NPUMHATokenToKOnlyPool", _NPU, releases=_NEW),
            PoolClass("NPUMiniMaxSparseKVPool", _NPU, releases=_NEW),
            PoolClass("DSV4NPUTokenToKVPool", _NPU_V4),
            PoolClass("NPUDeepSeekV4SingleKVPool", _NPU_V4),
            PoolClass("NPUDeepSeekV4IndexerPool", _NPU_V4),
            PoolClass("NPUCompressStatePool", _NPU_V4, Role.STATE),
            PoolClass("DSV4NPUReqToTokenPool", _NPU_V4_REQ, Role.TABLE),
            PoolClass("DSV4NPUDecodeReqToTokenPool", _NPU_V4_REQ, Role.TABLE),
            PoolClass(
                "DSV4NPUTokenToKVPoolAllocator", "hardware_backend.npu.dsv4.dsv4_allocator", Role.ALLOCATOR
            ),
            PoolClass("NPUPagedTokenToKVPoolAllocator", "hardware_backend.npu.allocator_npu", Role.ALLOCATOR),
        ),
    ),
    Kind(
        key="mlx",
        title="Apple MLX variants",
        reuse=Reuse.ANY_PAGE,
        page="arrays that the MLX backend keeps for each request or in a pool of its own",
        carried=False,
        reason="the KV is managed inside the MLX backend, out of reach of the scheduler's pool",
        classes=(
            PoolClass("_DummyKVCache", "hardware_backend.mlx.model_runner_stub"),
            PoolClass("MlxAttentionKVPool", "hardware_backend.mlx.kv_cache.attention_kv_pool"),
            PoolClass("ContiguousAttentionKVCache", _MLX_KV),
            PoolClass("PoolBackedAttentionKVCache", _MLX_KV),
            PoolClass("WindowedAttentionKVCache", _MLX_KV, releases=_NEW),
            PoolClass("MlxAuxiliaryStatePool", _MLX_STATE, Role.STATE),
            PoolClass("MlxAuxiliaryStateReqToTokenPool", _MLX_STATE, Role.TABLE),
        ),
    ),
    Kind(
        key="book-keeping",
        title="book-keeping of slots and requests (no KV)",
        reuse=Reuse.ANY_PAGE,
        page="none: says which slots are free and which belong to a request",
        carried=True,
        reason="the cache uses SGLang's own allocator and table",
        cure="",
        classes=(
            PoolClass("TokenToKVPoolAllocator", "mem_cache.allocator.token", Role.ALLOCATOR),
            PoolClass("PagedTokenToKVPoolAllocator", "mem_cache.allocator.paged", Role.ALLOCATOR),
            PoolClass("ReqToTokenPool", _POOL, Role.TABLE),
        ),
    ),
    Kind(
        key="disaggregated",
        title="book-keeping of prefill-decode disaggregation",
        reuse=Reuse.ANY_PAGE,
        page="none: as the request table, with rows set aside for KV on its way from a prefill server",
        carried=False,
        reason="KV that arrives from a prefill server bypasses the cache",
        cure=f"drop --disaggregation-mode, or {DROP_FLAG}",
        classes=(PoolClass("DecodeReqToTokenPool", _DECODE, Role.TABLE),),
    ),
    Kind(
        key="base",
        title="abstract bases",
        reuse=Reuse.NEVER,
        page="none: never made",
        carried=False,
        reason="only their subclasses hold KV",
        classes=(
            PoolClass("KVCache", _POOL, Role.BASE),
            PoolClass("BaseSWAKVPool", "mem_cache.base_swa_memory_pool", Role.BASE),
            PoolClass("BaseTokenToKVPoolAllocator", "mem_cache.allocator.base", Role.BASE),
        ),
    ),
)

_BY_KEY = {kind.key: kind for kind in KINDS}
_BY_CLASS = {(cls.full_module, cls.name): (kind, cls) for kind in KINDS for cls in kind.classes}


def kind_of(key: str) -> Kind:
    """The kind with this key; KeyError if there is none."""
    return _BY_KEY[key]


def lookup(module: str, name: str) -> tuple[Kind, PoolClass] | None:
    """Kind and entry of a class by its exact module (``sglang.srt...``) and name, None if unknown."""
    return _BY_CLASS.get((module, name))


def refusal(module: str, name: str, where: str = "") -> str:
    """One line for a class that is unknown or not carried: its name, its kind, why, and the cure.

    ``where`` says how the model holds it, for example ``params.mtp_draft_device_pools[0]``.
    """
    at = f" ({where})" if where else ""
    known = lookup(module, name)
    if known is None:
        return (
            f"this model keeps KV in {module}.{name}{at}, a class that hicache-ext does not know, so its "
            f"layout is unproven; {DROP_FLAG}, and report the class with SGLang's version"
        )
    kind, entry = known
    held = "a slot allocator of the kind" if entry.role is Role.ALLOCATOR else "which holds"
    return f"this model uses {name}{at}, {held} {kind.title}, not carried: {kind.reason}; {kind.cure}"


def document() -> str:
    """The text of ``docs/kv-structures.md``."""
    lines = [
        "# KV structures",
        "",
        f"Every pool class of SGLang {' and '.join(RELEASES)}, by what it holds. Made by",
        "`python -m hicache_ext.core.kv_spec > docs/kv-structures.md`; tests compare it with the registry,",
        "and the registry with the installed SGLang.",
        "",
        "A model whose pools are not all carried, or one with a class that is not listed, is refused with",
        "`--enable-hicache-ext`; the message names the pool. `hicache-ext doctor --model PATH` tells before.",
        "",
        "| structure | prefix can be reused | carried | why |",
        "|---|---|---|---|",
    ]
    for kind in KINDS:
        carried = "yes" if kind.carried else "no"
        lines.append(f"| {kind.title} | {kind.reuse} | {carried} | {kind.reason} |")
    for kind in KINDS:
        title = kind.title[0].upper() + kind.title[1:]
        lines += ["", f"## {title}", "", f"A page: {kind.page}."]
        if kind.cure:
            lines += ["", f"What to do: {kind.cure}."]
        if kind.classes:
            lines += ["", "| class | module in `sglang.srt` | role | SGLang |", "|---|---|---|---|"]
            for cls in kind.classes:
                releases = ", ".join(cls.releases)
                lines.append(f"| `{cls.name}` | `{cls.module}` | {cls.role} | {releases} |")
        if kind.shares:
            lines += [
                "",
                "Held in classes of another kind: " + ", ".join(f"`{n}`" for n in kind.shares) + ".",
            ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
