"""All optimizers of a run, with their work and state sharded over the ranks.

Every rank holds all parameters. In a step, a reduce-scatter sums the gradients, each rank updates its shard, and an
all-gather collects the new parameters. This is ZeRO's second stage (Rajbhandari et al. 2019, arXiv 1910.02054). A shard
for Muon consists of whole matrices, as in modded-nanogpt. The all-gather of one optimizer overlaps with the
next optimizer's computation.

With one rank, nothing is sharded: the optimizers work on the parameters themselves.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optim.schedule import set_lr


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that one optimizer updates. `make` constructs the optimizer.

    units: returns a parameter as a view (units, *unit_shape). Sharding never splits a unit, such as a matrix.
    lr_scale: returns the factor that the optimizer applies to the learning rate of a parameter.
    """

    params: list[nn.Parameter]
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    peak_lr: float
    units: Callable[[Tensor], Tensor] = torch.flatten
    lr_scale: Callable[[Tensor], float] | None = None


class Bucket:
    """Parameters of one group with the same unit shape. One collective sends the whole bucket.

    shard: this rank's part of the parameters. With one rank, a bucket has one parameter, which is its shard.
    """

    def __init__(self, group: Group, params: list[nn.Parameter], rank: int, world_size: int):
        self.params, self.as_units, self.sharded = params, group.units, world_size > 1
        views = [group.units(p.detach()) for p in params]
        self.unit_shape, self.counts = views[0].shape[1:], [len(view) for view in views]  # counts: units per parameter
        self.units_per_rank = -(-sum(self.counts) // world_size)  # rounded up; the last units may be padding
        self.num_units = self.units_per_rank * world_size
        self.shard_slice = slice(rank * self.units_per_rank, (rank + 1) * self.units_per_rank)
        self.shard = params[0]
        if self.sharded:
            self.shard = nn.Parameter(self.shard_of([p.detach() for p in params]).clone())
            if group.lr_scale:
                scales = [p.new_full(p.shape, group.lr_scale(p)) for p in params]
                self.shard.lr_scale = self.shard_of(scales)[:, :1, :1].clone()  # (units_per_rank, 1, 1)

    def shard_of(self, tensors: list[Tensor]) -> Tensor:
        """Return this rank's shard of tensors that have the shapes of the parameters."""
        return self.pack(tensors)[self.shard_slice] if self.sharded else tensors[0]

    def pack(self, tensors: list[Tensor]) -> Tensor:
        """Concatenate tensors with the parameters' shapes to one (num_units, *unit_shape), a view if possible."""
        parts = [self.as_units(t) for t in tensors]
        if padding := self.num_units - sum(self.counts):
            parts.append(parts[0].new_zeros(padding, *self.unit_shape))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def unpack(self, full: Tensor, tensors: list[Tensor]):
        """Copy (num_units, *unit_shape) into tensors that have the shapes of the parameters."""
        torch._foreach_copy_([self.as_units(t) for t in tensors], full[: sum(self.counts)].split(self.counts))

    def reduce_gradients(self):
        """Sum the gradients over the ranks, and keep this rank's shard of the sum."""
        full = self.pack([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])
        for p in self.params:
            p.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        if full.is_cuda:
            dist.reduce_scatter_single(self.shard.grad, full)
        else:  # gloo's reduce-scatter is half as fast on CPUs, so we use all-to-all and a sum (results/speed/cpu.md)
            summands = torch.empty_like(full)
            dist.all_to_all_single(summands, full)
            torch.sum(summands.unflatten(0, (-1, self.units_per_rank)), dim=0, out=self.shard.grad)

    def start_gathering(self):
        full = self.as_units(self.params[0].detach())  # a single parameter that fits receives the result
        if len(self.params) > 1 or len(full) < self.num_units or not full.is_contiguous():
            full = self.shard.new_empty(self.num_units, *self.unit_shape)
        self.gathering = full, dist.all_gather_single(full, self.shard.detach(), async_op=True)

    def finish_gathering(self):
        full, work = self.gathering
        self.gathering = None  # else this copy of the parameters would stay until the next step
        work.wait()
        self.unpack(full, [p.detach() for p in self.params])

    def gather(self, shard: Tensor) -> list[Tensor]:
        """Gather the shards of all ranks. Return tensors with the shapes of the parameters.

        A single number, such as Adam's step count, is returned once for each parameter.
        """
        if shard.dim() == 0 or not self.sharded:
            return [shard] * len(self.params)
        full = shard.new_empty(self.num_units, *self.unit_shape)
        dist.all_gather_single(full, shard.contiguous())
        tensors = [shard.new_empty(p.shape) for p in self.params]
        self.unpack(full, tensors)
        return tensors


class Optimizers:
    """All optimizers of a run. A step is:

        for each micro-batch: loss.backward()
        loss, grad_norm = reduce(loss)
        step(lr_factor, finite)

    A step that is not finite is skipped. skip: if False, all later steps are skipped too.
    """

    def __init__(self, groups: dict[str, Group], rank: int = 0, world_size: int = 1, *, skip: bool = False):
        self.skip = skip
        self.groups = {name: group for name, group in groups.items() if group.params}
        self.buckets = {name: make_buckets(group, rank, world_size) for name, group in self.groups.items()}
        self.optimizers = {
            name: group.make([bucket.shard for bucket in self.buckets[name]]) for name, group in self.groups.items()
        }
        device = self.all_buckets()[0].shard.device
        self.found_inf = torch.zeros((), device=device)  # 1 after a step that was not finite, unless `skip`

    def all_buckets(self) -> list[Bucket]:
        return [bucket for buckets in self.buckets.values() for bucket in buckets]

    def sharded_buckets(self) -> list[Bucket]:
        """Return the buckets that are divided over ranks: all buckets, or none in a run with one rank."""
        return [bucket for bucket in self.all_buckets() if bucket.sharded]

    def reduce(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Sum and shard the gradients. Return the sum of the ranks' losses, and the norm of all gradients, both 0-D."""
        sums = torch.stack([loss, self.reduce_gradients()])  # loss, squared norm
        if self.sharded_buckets():
            dist.all_reduce(sums)
        loss, squared_norm = sums
        return loss, squared_norm.sqrt()

    @torch.no_grad()
    def reduce_gradients(self) -> Tensor:
        """Sum and shard the gradients. Return this rank's part of the squared norm of all gradients."""
        for bucket in self.sharded_buckets():
            bucket.reduce_gradients()
        shards = [bucket.shard for bucket in self.all_buckets()]
        for shard in shards:
            if shard.grad is None:  # as in a run with several ranks
                shard.grad = torch.zeros_like(shard)
        norms = torch._foreach_norm([shard.grad for shard in shards], dtype=torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms)).square()

    @torch.no_grad()
    def step(self, lr_factor: float, finite: Tensor) -> None:
        """Update all parameters, each with lr_factor times its peak learning rate, and drop the gradients.

        finite: a bool tensor on the device. If it is False, parameters and state do not change. Without `skip`,
        `found_inf` then stays 1, so later steps change nothing either.
        """
        self.lr_factor = lr_factor
        skipped = torch.maximum(self.found_inf, (~finite).float())
        if not self.skip:
            self.found_inf.copy_(skipped)

        def matrices_last(name):  # Muon comes last, so Adam's parameters are sent while Muon computes
            return len(self.buckets[name][0].unit_shape)

        for name in sorted(self.groups, key=matrices_last):
            optimizer = self.optimizers[name]
            set_lr(optimizer, self.groups[name].peak_lr * lr_factor)
            optimizer.found_inf = skipped  # if 1, Muon and PyTorch's fused optimizers update nothing
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for bucket in self.buckets[name]:
                if bucket.sharded:
                    bucket.start_gathering()
        for bucket in self.sharded_buckets():
            bucket.finish_gathering()

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each group in the last step."""
        return {name: group.peak_lr * self.lr_factor for name, group in self.groups.items()}

    def state_dict(self) -> dict:
        """Return the full state of each parameter, which any number of ranks can load. All ranks must call this."""
        result = {}
        for name, group in self.groups.items():
            state = {}
            for bucket in self.buckets[name]:
                for key, value in self.optimizers[name].state[bucket.shard].items():
                    for p, full in zip(bucket.params, bucket.gather(value)):
                        state.setdefault(p, {})[key] = full
            result[name] = {"state": {i: state[p] for i, p in enumerate(group.params) if p in state}}
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        for name, group in self.groups.items():
            state = {p: state_dict[name]["state"].get(i, {}) for i, p in enumerate(group.params)}  # {}: no step yet
            for bucket in self.buckets[name]:
                shard_state = self.optimizers[name].state[bucket.shard]
                for key, value in state[bucket.params[0]].items():
                    if value.dim() > 0:
                        value = bucket.shard_of([state[p][key].to(p.device) for p in bucket.params])
                    shard_state[key] = value.to(bucket.shard.device, copy=True)

    @torch.no_grad()
    def load_parameters(self) -> None:
        """Copy the parameters into the shards, after other code has changed the parameters."""
        for bucket in self.sharded_buckets():
            bucket.shard.copy_(bucket.shard_of([p.detach() for p in bucket.params]))


def make_buckets(group: Group, rank: int, world_size: int) -> list[Bucket]:
    """Return the buckets of a group: one for each unit shape. With one rank, one for each parameter."""
    if world_size == 1:
        return [Bucket(group, [p], rank, world_size) for p in group.params]
    by_shape = defaultdict(list)
    for p in reversed(group.params):  # the order must stay, because it decides the rounding of the norm
        by_shape[group.units(p.detach()).shape[1:], p.dtype].append(p)
    return [Bucket(group, params, rank, world_size) for params in by_shape.values()]
