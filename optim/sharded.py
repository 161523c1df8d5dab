"""All optimizers of a run, with their work and state sharded over the ranks.

Every rank holds all parameters. In a step, a reduce-scatter sums the gradients, each rank updates its shard, and an
all-gather collects the new parameters. This is ZeRO's second stage (Rajbhandari et al. 2019, arXiv 1910.02054). A shard
for Muon consists of whole matrices, as in modded-nanogpt. The all-gather of one optimizer overlaps with the
next optimizer's computation.

With one rank, nothing is sharded: the optimizers work on the parameters themselves.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optim.schedule import set_lr

# torch 2.11 has only the older names, and torch 2.13 warns about them.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that one optimizer updates. `make` constructs the optimizer from a list of them.

    units: returns a parameter as a view (units, *unit_shape). Sharding never splits a unit, such as a matrix.
    lr_scale: returns the factor that the optimizer applies to the learning rate of a parameter.
    """

    params: list[nn.Parameter]
    make: Callable
    peak_lr: float
    units: Callable = torch.flatten
    lr_scale: Callable | None = None


class Bucket:
    """Parameters of one group with the same unit shape. One collective sends the whole bucket.

    shard: this rank's part of the parameters. With one rank, a bucket has one parameter, which is its shard.
    """

    def __init__(self, group: Group, params: list[nn.Parameter], rank: int, world_size: int):
        self.params = params
        self.as_units = group.units
        self.sharded = world_size > 1

        # 1. Divide the units evenly over the ranks. The last units may be padding.
        views = self.views(params)
        self.unit_shape = views[0].shape[1:]
        self.counts = [len(view) for view in views]  # units of each parameter
        self.units_per_rank = math.ceil(sum(self.counts) / world_size)
        self.num_units = self.units_per_rank * world_size
        self.first_unit = rank * self.units_per_rank

        # 2. Copy this rank's units.
        self.shard = params[0]
        if self.sharded:
            self.shard = nn.Parameter(self.shard_of(params).clone())
            if group.lr_scale:
                scales = [p.new_full(p.shape, group.lr_scale(p)) for p in params]
                self.shard.lr_scale = self.shard_of(scales)[:, :1, :1].clone()  # (units_per_rank, 1, 1)

    def views(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return tensors with the shapes of the parameters as views (units, *unit_shape)."""
        return [self.as_units(t.detach()) for t in tensors]

    def shard_of(self, tensors: list[Tensor]) -> Tensor:
        """Return this rank's shard of tensors that have the shapes of the parameters."""
        if not self.sharded:
            return tensors[0]
        return self.pack(tensors).narrow(0, self.first_unit, self.units_per_rank)

    def pack(self, tensors: list[Tensor]) -> Tensor:
        """Concatenate tensors with the parameters' shapes to one (num_units, *unit_shape), a view if possible."""
        parts = self.views(tensors)
        padding = self.num_units - sum(self.counts)
        if padding:
            parts.append(parts[0].new_zeros(padding, *self.unit_shape))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def unpack(self, full: Tensor, tensors: list[Tensor]):
        """Copy (num_units, *unit_shape) into tensors that have the shapes of the parameters."""
        without_padding = full[: sum(self.counts)]
        torch._foreach_copy_(self.views(tensors), without_padding.split(self.counts))

    def reduce_gradients(self):
        """Sum the gradients over the ranks, and keep this rank's shard of the sum."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        full = self.pack(gradients)
        for p in self.params:
            p.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        if full.is_cuda:
            reduce_scatter(self.shard.grad, full)
        else:  # gloo's reduce-scatter is half as fast on CPUs, so we use all-to-all and a sum (results/speed/cpu.md)
            summands = torch.empty_like(full)
            dist.all_to_all_single(summands, full)
            torch.sum(summands.unflatten(0, (-1, self.units_per_rank)), dim=0, out=self.shard.grad)

    def start_gathering(self):
        """Start to send this rank's shard to all ranks, and to receive theirs."""
        full = self.views(self.params)[0]  # a single parameter that fits receives the result
        if len(self.params) > 1 or len(full) < self.num_units or not full.is_contiguous():
            full = self.shard.new_empty(self.num_units, *self.unit_shape)
        work = all_gather(full, self.shard.detach(), async_op=True)
        self.gathering = full, work

    def finish_gathering(self):
        """Wait for the shards of all ranks, and copy them to the parameters."""
        full, work = self.gathering
        work.wait()
        self.unpack(full, self.params)
        self.gathering = None  # else this copy of the parameters would stay until the next step

    def gather(self, shard: Tensor) -> list[Tensor]:
        """Gather the shards of all ranks. Return tensors with the shapes of the parameters.

        A single number, such as Adam's step count, is returned once for each parameter.
        """
        if shard.dim() == 0 or not self.sharded:
            return [shard] * len(self.params)
        full = shard.new_empty(self.num_units, *self.unit_shape)
        all_gather(full, shard.contiguous())
        tensors = [shard.new_empty(p.shape) for p in self.params]
        self.unpack(full, tensors)
        return tensors


class Optimizers:
    """All optimizers of a run. A step is:

        for each micro-batch: loss.backward()
        loss, grad_norm = reduce(loss)
        step(lr_factor, finite)

    A step that is not finite is skipped. continue_after_nonfinite: if False, all later steps are skipped too.
    """

    def __init__(
        self,
        groups: dict[str, Group],
        rank: int = 0,
        world_size: int = 1,
        *,
        continue_after_nonfinite: bool = False,
    ):
        self.continue_after_nonfinite = continue_after_nonfinite
        self.groups = {name: group for name, group in groups.items() if group.params}
        self.buckets = {}
        self.optimizers = {}
        for name, group in self.groups.items():
            buckets = make_buckets(group, rank, world_size)
            self.buckets[name] = buckets
            self.optimizers[name] = group.make([bucket.shard for bucket in buckets])
        device = self.all_buckets()[0].shard.device
        self.updates = 0  # that have begun
        self.found_inf = torch.zeros((), device=device)  # 1 after a step that was not finite, if later steps stop

    def all_buckets(self) -> list[Bucket]:
        """Return the buckets of all groups."""
        return sum(self.buckets.values(), [])

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
    def step(self, lr_factor: float, finite: Tensor):
        """Update all parameters, each with lr_factor times its peak learning rate, and drop the gradients.

        finite: a bool tensor on the device. If it is False, parameters and state do not change. Then `found_inf` stays
        1, so later steps change nothing either, unless the optimizers `continue_after_nonfinite`.
        """
        self.updates += 1
        self.lr_factor = lr_factor
        skipped = torch.maximum(self.found_inf, (~finite).float())
        if not self.continue_after_nonfinite:
            self.found_inf.copy_(skipped)

        # 1. Update the shards. Muon, whose units are matrices, comes last, so Adam's are sent while Muon computes.
        for name in sorted(self.groups, key=lambda name: len(self.buckets[name][0].unit_shape)):
            optimizer = self.optimizers[name]
            set_lr(optimizer, self.groups[name].peak_lr * lr_factor)
            optimizer.found_inf = skipped  # if 1, Muon and PyTorch's fused optimizers update nothing
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for bucket in self.buckets[name]:
                if bucket.sharded:
                    bucket.start_gathering()

        # 2. Receive the shards of the other ranks.
        for bucket in self.sharded_buckets():
            bucket.finish_gathering()

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each group in the last step."""
        return {name: group.peak_lr * self.lr_factor for name, group in self.groups.items()}

    def state_dict(self) -> dict:
        """Return the full state of each parameter, which any number of ranks can load. All ranks must call this."""
        result = {}
        for name, group in self.groups.items():
            # 1. Gather the state of each parameter.
            states = defaultdict(dict)
            for bucket in self.buckets[name]:
                for key, value in self.optimizers[name].state[bucket.shard].items():
                    for p, full in zip(bucket.params, bucket.gather(value)):
                        states[p][key] = full

            # 2. Name the parameters by their numbers, as PyTorch's optimizers do.
            numbered = {i: states[p] for i, p in enumerate(group.params) if p in states}
            result[name] = {"state": numbered}
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict):
        """Keep this rank's shard of a state that state_dict returned."""
        for name, group in self.groups.items():
            stored = state_dict[name]["state"]
            states = {p: stored.get(i, {}) for i, p in enumerate(group.params)}  # {}: no step yet
            for bucket in self.buckets[name]:
                shard_state = self.optimizers[name].state[bucket.shard]
                for key, value in states[bucket.params[0]].items():
                    if value.dim() > 0:
                        full = [states[p][key].to(p.device) for p in bucket.params]
                        value = bucket.shard_of(full)
                    shard_state[key] = value.to(bucket.shard.device, copy=True)

    @torch.no_grad()
    def load_parameters(self):
        """Copy the parameters into the shards, after other code has changed the parameters."""
        for bucket in self.sharded_buckets():
            bucket.shard.copy_(bucket.shard_of(bucket.params))


def make_buckets(group: Group, rank: int, world_size: int) -> list[Bucket]:
    """Return the buckets of a group: one for each unit shape. With one rank, one for each parameter."""
    if world_size == 1:
        return [Bucket(group, [p], rank, world_size) for p in group.params]
    by_shape = defaultdict(list)
    for p in reversed(group.params):  # the order must stay, because it decides the rounding of the norm
        by_shape[group.units(p.detach()).shape[1:], p.dtype].append(p)
    return [Bucket(group, params, rank, world_size) for params in by_shape.values()]
