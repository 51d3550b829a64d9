"""Takes requests back that computed on pages which did not verify, before any of their tokens is used.

The batch whose result is about to be processed is already over, and under the overlap
scheduler the next one, with the same requests, may be running: SGLang skips results of retracted requests, so
they are marked at once, and go back to the queue when no result of theirs is outstanding.
"""

from __future__ import annotations

from typing import Any

from hicache_ext.core.residency import Doubt


class Recompute:
    """Requests on their way back to the waiting queue; ``count`` is the number since start."""

    def __init__(self) -> None:
        self.count = 0
        self._held: list[Any] = []
        self._scheduler: Any = None

    def take_back(self, scheduler: Any, batch: Any) -> None:
        """Retract every request of ``batch`` whose pages are condemned."""
        live = [r for r in batch.reqs if not r.finished() and not r.is_retracted and self.holds_kv(r)]
        tainted = [r for r in live if r.last_node is not None and r.last_node.doubt is Doubt.CORRUPT]
        if not tainted:
            return
        self._scheduler = scheduler
        # The results of a batch that returns logprobs are sliced by position: all or none.
        for req in live if batch.return_logprob else tainted:
            self._retract(scheduler, req)

    def settle(self, *, between_steps: bool) -> None:
        """Move on what can: out of the batches, then back to the queue."""
        if not self._held:
            return
        scheduler = self._scheduler
        outstanding = outstanding_batches(scheduler)
        if between_steps or not outstanding:
            self._leave_batches(scheduler)
        if between_steps:
            for req in [r for r in self._held if not any(r in batch.reqs for batch in outstanding)]:
                self._held.remove(req)
                self._requeue(scheduler, req)

    def on_control(self, request: Any) -> None:
        """Pausing retracts what is in the batches, aborting looks for a request in batches and queue."""
        self.settle(between_steps=False)
        if self._held and type(request).__name__ == "AbortReq":
            from sglang.srt.managers.schedule_batch import FINISH_ABORT

            for req in self._held:
                if request.abort_all or req.rid.startswith(request.rid):
                    req.to_finish = FINISH_ABORT()

    # What another release does differently

    def holds_kv(self, req: Any) -> bool:
        """Whether a request has a row of KV slots."""
        return req.kv.holds_kv

    def release(self, req: Any, scheduler: Any) -> None:
        """Free a request's KV without publishing any of it, and mark the request as retracted."""
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
        req.reset_for_retract()
        req.host_loaded_length = 0

    def filter_out(self, batch: Any, reqs: list[Any]) -> None:
        """Take requests out of a batch."""
        batch.filter_batch(reqs_to_exclude=reqs)

    # The steps

    def _retract(self, scheduler: Any, req: Any) -> None:
        self.release(req, scheduler)
        if not req.output_ids:
            # Nothing of it was used, so its cache hits are counted anew.
            req.retracted_stain = False
            req.cached_tokens = 0
            req._cache_breakdown_computed = False
        if scheduler.chunked_req is req:
            scheduler.chunked_req = None
        self._held.append(req)
        self.count += 1

    def _leave_batches(self, scheduler: Any) -> None:
        for batch in {id(b): b for b in (scheduler.running_batch, scheduler.last_batch) if b}.values():
            if any(req in batch.reqs for req in self._held):
                self.filter_out(batch, self._held)
                batch.batch_is_full = False

    def _requeue(self, scheduler: Any, req: Any) -> None:
        # It had been admitted, so neither the queue's limit nor its order holds it up.
        scheduler._prefetch_kvcache(req)
        scheduler.waiting_queue.insert(0, req)
        req.time_stats.set_wait_queue_entry_time()


def outstanding_batches(scheduler: Any) -> list[Any]:
    """Batches whose results have not been processed; there are some with SGLang's overlap only."""
    return [batch for batch, _ in getattr(scheduler, "result_queue", ())]
