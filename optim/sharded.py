"""The optimizers of a run as one, their work and their state divided over the processes.

All processes hold all parameters. In a step, gradients are summed and divided (reduce-scatter), each process updates
the share that it owns, and the new parameters are collected (all-gather): ZeRO's second stage (Rajbhandari et al.
2019, arXiv 1910.02054), with whole matrices as the units where the optimizer needs them whole, as modded-nanogpt does.
Gradients travel in buckets that set off in the backward pass as soon as they are complete, and parameters of one
optimizer travel while the next one computes.

There are not enough matrices to divide among hundreds of processes, nor would it pay. More than MOST_SHARES of them
form groups of that many (of 8: the GPUs of one machine), each of which does the whole update; between the groups,
every rank adds up its share of the gradients with those that own the same share.

One process has nothing to divide: there the optimizers work on the parameters themselves.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optim.schedule import set_lr

MOST_SHARES = 8  # the 162M model has 48 matrices of 768 x 768, and 12 of each MLP shape
BUCKET_BYTES = 2**24  # a bucket is closed from this size on: smaller messages cost more than they overlap


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that one optimizer updates, `make` being its constructor.

    units: a view of a parameter, or of another tensor of its shape, as (n, *unit), a unit being what the optimizer
    needs whole. lr_scale: what it multiplies the learning rate of a parameter with, if it does.
    """

    params: list[nn.Parameter]
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    peak_lr: float
    units: Callable[[Tensor], Tensor] = torch.flatten
    lr_scale: Callable[[Tensor], float] | None = None


class Bucket:
    """Parameters of one group whose gradients travel together, and this rank's share of them, one of `shares`."""

    def __init__(self, group: Group, params: list[nn.Parameter], rank: int, shares: int):
        self.params, self.units_of = params, group.units
        views = [group.units(p.detach()) for p in params]
        self.unit, self.counts = views[0].shape[1:], [len(view) for view in views]
        self.share = -(-sum(self.counts) // shares)  # units a rank; the last ranks may own padding
        self.units = self.share * shares
        self.mine = slice(rank * self.share, (rank + 1) * self.share)
        if shares == 1:
            (self.shard,) = params
            return
        self.shard = nn.Parameter(self.pack([p.detach() for p in params])[self.mine].clone())
        if group.lr_scale:
            scales = [p.new_full(p.shape, group.lr_scale(p)) for p in params]
            self.shard.lr_scale = self.pack(scales)[self.mine, :1, :1].clone()
        self.travelling = None  # the full tensor and the collective that reads or writes it

    def pack(self, tensors: list[Tensor]) -> Tensor:
        """Tensors of the shapes of the parameters as (units, *unit): a view where that is possible."""
        parts = [self.units_of(t) for t in tensors]
        if padding := self.units - sum(self.counts):
            parts.append(parts[0].new_zeros(padding, *self.unit))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def unpack(self, full: Tensor, tensors: list[Tensor]):
        """Into tensors of the shapes of the parameters."""
        torch._foreach_copy_([self.units_of(t) for t in tensors], full[: sum(self.counts)].split(self.counts))

    def start_reducing(self, group: dist.ProcessGroup | None):
        full = self.pack([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])
        for p in self.params:
            p.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        if full.is_cuda:
            self.travelling = full, dist.reduce_scatter_tensor(self.shard.grad, full, group=group, async_op=True)
        else:  # gloo's own takes twice as long as to exchange the shares and add them up (results/speed/cpu.md)
            shares = torch.empty_like(full)
            self.travelling = shares, dist.all_to_all_single(shares, full, group=group, async_op=True)

    def finish_reducing(self):
        shares = self.wait()
        if not shares.is_cuda:
            torch.sum(shares.unflatten(0, (-1, self.share)), dim=0, out=self.shard.grad)

    def start_gathering(self, group: dist.ProcessGroup | None):
        full = self.units_of(self.params[0].detach())
        if len(self.params) > 1 or len(full) < self.units or not full.is_contiguous():
            full = self.shard.new_empty(self.units, *self.unit)  # else straight into the parameter
        self.travelling = full, dist.all_gather_into_tensor(full, self.shard.detach(), group=group, async_op=True)

    def wait(self) -> Tensor:
        full, work = self.travelling
        self.travelling = None
        work.wait()
        return full

    def gather(self, shard: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
        """The whole of a tensor of which each rank has its share, in the shapes of the parameters."""
        full = shard.new_empty(self.units, *self.unit)
        dist.all_gather_into_tensor(full, shard.contiguous(), group=group)
        tensors = [shard.new_empty(p.shape) for p in self.params]
        self.unpack(full, tensors)
        return tensors


class Optimizers:
    """See the head of this file. Groups come in the order in which the backward pass reaches them, their parameters in
    that of the forward pass. A step is:

        for each micro-batch: (before the last one's backward pass) start(); loss.backward()
        squared_norm = finish()
        step(lr_factor, finite)

    rank, world_size: of the processes that share the work, the default group of torch.distributed.
    skip: go on after a step that was not finite, else nothing is updated any more.
    """

    def __init__(self, groups: dict[str, Group], rank: int = 0, world_size: int = 1, *, skip: bool = False):
        self.skip = skip
        self.groups = {name: group for name, group in groups.items() if group.params}
        self.shares = next(n for n in range(min(MOST_SHARES, world_size), 0, -1) if world_size % n == 0)
        self.copies = world_size // self.shares  # of each share
        self.sharers = self.owners = None  # the ranks that this one shares the work with; those with the same share
        if self.copies > 1 and dist.is_initialized():
            by_copy = torch.arange(world_size).view(self.copies, self.shares)
            self.sharers, _ = dist.new_subgroups_by_enumeration(by_copy.tolist())
            self.owners, _ = dist.new_subgroups_by_enumeration(by_copy.T.tolist())
        rank = rank % self.shares
        self.buckets = {name: make_buckets(group, rank, self.shares) for name, group in self.groups.items()}
        self.optimizers = {
            name: group.make([bucket.shard for bucket in self.buckets[name]]) for name, group in self.groups.items()
        }
        device = next(bucket.shard.device for bucket in self.all_buckets())
        self.found_inf = torch.zeros((), device=device)  # from the first gradient that is not finite on: 1
        self.unsent, self.missing = [], {}
        if self.shares > 1:
            for bucket in self.all_buckets():
                for p in bucket.params:
                    p.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._arrived(bucket))

    def all_buckets(self) -> list[Bucket]:
        return [bucket for buckets in self.buckets.values() for bucket in buckets]

    def start(self) -> None:
        """The gradients of the coming backward pass are the last of this step: they are to be sent as they come."""
        if self.shares > 1:
            self.unsent = self.all_buckets()
            self.missing = {bucket: len(bucket.params) for bucket in self.unsent}

    def _arrived(self, bucket: Bucket) -> None:
        if bucket in self.missing:
            self.missing[bucket] -= 1
            while self.unsent and self.missing[self.unsent[0]] == 0:  # in an order that is the same on all ranks
                self.unsent.pop(0).start_reducing(self.sharers)

    @torch.no_grad()
    def finish(self) -> Tensor:
        """Waits for all gradients. What this rank adds to the squared norm of all: the sum over the ranks is that."""
        for bucket in self.unsent:  # parameters without gradients, or one late parameter before many early ones
            bucket.start_reducing(self.sharers)
        self.unsent, self.missing = [], {}
        if self.shares > 1:
            for bucket in self.all_buckets():
                bucket.finish_reducing()
        gradients = [b.shard.grad for b in self.all_buckets() if b.shard.grad is not None]
        if self.copies > 1:
            for work in [dist.all_reduce(g, group=self.owners, async_op=True) for g in gradients]:
                work.wait()
        return torch.nn.utils.get_total_norm(gradients).square() / self.copies

    @torch.no_grad()
    def step(self, lr_factor: float, finite: Tensor) -> None:
        """Updates all parameters, each with lr_factor times its peak learning rate, and drops the gradients.

        finite: a bool on the device. Where it is False parameters and state stay as they are; without `skip`, in all
        later steps too, as `found_inf` is 1 from then on.
        """
        masked = torch.maximum(self.found_inf, (~finite).float())
        if not self.skip:
            self.found_inf.copy_(masked)

        def whole_units(name):
            return len(self.buckets[name][0].unit)

        for name in sorted(self.groups, key=whole_units):  # Adam's parameters travel while Muon computes
            optimizer = self.optimizers[name]
            set_lr(optimizer, self.groups[name].peak_lr * lr_factor)
            optimizer.found_inf = masked
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if self.shares > 1:
                for bucket in self.buckets[name]:
                    bucket.start_gathering(self.sharers)
        if self.shares > 1:
            for bucket in self.all_buckets():
                bucket.unpack(bucket.wait(), [p.detach() for p in bucket.params])

    def learning_rates(self, lr_factor: float) -> dict[str, float]:
        return {name: group.peak_lr * lr_factor for name, group in self.groups.items()}

    def state_dict(self) -> dict:
        """The state of each parameter, whole: any number of processes can go on from it. All ranks must call this."""
        result = {}
        for name, group in self.groups.items():
            state = {}
            for bucket in self.buckets[name]:
                for key, value in self.optimizers[name].state[bucket.shard].items():
                    if value.dim() == 0 or self.shares == 1:  # Adam's count of steps is a number
                        values = [value] * len(bucket.params)
                    else:
                        values = bucket.gather(value, self.sharers)
                    for p, whole in zip(bucket.params, values):
                        state.setdefault(p, {})[key] = whole
            result[name] = {"state": {i: state[p] for i, p in enumerate(group.params) if p in state}}
        return result

    @torch.no_grad()
    def load_state_dict(self, result: dict) -> None:
        for name, group in self.groups.items():
            state = dict(zip(group.params, (result[name]["state"].get(i, {}) for i in range(len(group.params)))))
            for bucket in self.buckets[name]:
                ours = self.optimizers[name].state[bucket.shard]
                for key, first in state[bucket.params[0]].items():
                    if first.dim() == 0:
                        ours[key] = first.to(bucket.shard.device, copy=True)
                    else:
                        whole = [state[p][key].to(p.device) for p in bucket.params]
                        share = bucket.pack(whole)[bucket.mine] if self.shares > 1 else whole[0]
                        ours[key] = share.clone()

    @torch.no_grad()
    def load_parameters(self) -> None:
        """Takes the values of the parameters over, after they were changed from outside."""
        if self.shares > 1:
            for bucket in self.all_buckets():
                bucket.shard.copy_(bucket.pack([p.detach() for p in bucket.params])[bucket.mine])

    def bytes_a_step(self) -> dict[str, int]:
        """What a rank hands to each collective in a step."""
        mine = sum(bucket.shard.nbytes for bucket in self.all_buckets())
        divided = self.shares > 1
        sent = dict(reduce_scatter=divided * mine * self.shares, all_gather=divided * mine)
        return sent | dict(all_reduce=mine if self.copies > 1 else 0)


def make_buckets(group: Group, rank: int, shares: int) -> list[Bucket]:
    """In the order in which they will be complete. A bucket holds units of one shape, as many as the ranks share evenly
    as far as there are enough."""
    if shares == 1:
        return [Bucket(group, [p], rank, shares) for p in group.params]
    buckets, filling = [], defaultdict(list)
    for p in reversed(group.params):
        units = group.units(p.detach())
        params = filling[units.shape[1:], p.dtype]
        params.append(p)
        numel = sum(p.numel() for p in params)
        if numel // units[0].numel() % shares == 0 and numel * p.element_size() >= BUCKET_BYTES:
            buckets.append(Bucket(group, filling.pop((units.shape[1:], p.dtype)), rank, shares))
    return buckets + [Bucket(group, params, rank, shares) for params in filling.values()]
