"""The GPT of modded-nanogpt's record #8 (Keller Jordan et al., 2024-11-03). The paper names "a modded-nanogpt variant".

tokens -> embedding -> norm -> layers x { x += attention(norm(x)); x += mlp(norm(x)) } -> norm -> head

Norms are RMSNorm without parameters. q and k are normalised per head before the attention method (QK-norm). The MLP is
4 times as wide, with ReLU^2. There are no biases. Embedding and head are not tied. Output projections and head start at
zero, so the first loss is ln(vocabulary).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.activations import relu_squared
from model.attention.attend import attend
from model.attention.choose import choose_backend
from model.attention.plan import LayerPlan, Plan, plan_layer
from model.loss import mean_loss, token_losses
from model.methods.base import Method
from model.methods.make import layer_methods
from model.methods.names import layer_pattern
from model.tensors import linear

NORM_EPS = 1.1920929e-07  # float32's epsilon for all dtypes; PyTorch's default for bfloat16 differs between versions


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=NORM_EPS)


class Attention(nn.Module):
    def __init__(self, model_dim: int, num_heads: int, method: nn.Module):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Parameter(torch.empty(3, model_dim, model_dim))  # three matrices, one matmul
        self.proj = nn.Parameter(torch.empty(model_dim, model_dim))
        self.method = method

    def queries_keys_values(self, x: Tensor) -> list[Tensor]:  # three of (B, H, T, D)
        B, T, C = x.shape
        qkv = linear(x, self.qkv.flatten(0, 1))
        qkv = qkv.view(B, T, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.unbind(2)  # unbind comes before the transpose, so gradients need no transposed copy
        return [y.transpose(1, 2) for y in (norm(q), norm(k), v)]  # the transpose comes last, so norm and rotation fuse

    def forward(self, x: Tensor, plan: LayerPlan, cache=None) -> Tensor:  # x (B, T, C)
        q, k, v = self.queries_keys_values(x)
        y = attend(self.method, q, k, v, x, plan=plan, cache=cache)  # (B, H, T, D)
        return linear(y.transpose(1, 2).flatten(2), self.proj)


class MLP(nn.Module):
    def __init__(self, model_dim: int):
        super().__init__()
        self.up = nn.Parameter(torch.empty(4 * model_dim, model_dim))
        self.down = nn.Parameter(torch.empty(model_dim, 4 * model_dim))

    def forward(self, x: Tensor) -> Tensor:  # x (B, T, C)
        return linear(relu_squared(linear(x, self.up)), self.down)


class Block(nn.Module):
    def __init__(self, model_dim: int, num_heads: int, method: nn.Module):
        super().__init__()
        self.attention = Attention(model_dim, num_heads, method)
        self.mlp = MLP(model_dim)

    def forward(self, x: Tensor, plan: LayerPlan, cache=None) -> Tensor:  # x (B, T, C); decoding passes a cache
        x = x + self.attention(norm(x), plan, cache)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    def __init__(self, config, dtype: torch.dtype = torch.float32):
        """Initialise every parameter, in float32. dtype: data type of the computation.

        config: an object with the fields of a model, such as configs.config.Config: vocab_size, num_layers, num_heads,
        model_dim, train_length, position_scale, method, method_options. Raise ValueError for an unknown method or
        option.
        """
        super().__init__()
        methods = layer_methods(config)
        self.dtype = dtype
        self.pattern_length = len(layer_pattern(config.method))
        self.embedding = nn.Embedding(config.vocab_size, config.model_dim)
        self.blocks = nn.ModuleList(Block(config.model_dim, config.num_heads, method) for method in methods)
        self.head = nn.Parameter(torch.empty(config.vocab_size, config.model_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """Draw the embedding from N(0, 1), qkv and up from U(-1, 1) / sqrt(fan_in), methods last. Others start at 0."""
        nn.init.normal_(self.embedding.weight)
        for block in self.blocks:
            for weight in (block.attention.qkv, block.mlp.up):
                weight.uniform_(-(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)
            block.attention.proj.zero_()
            block.mlp.down.zero_()
        self.head.zero_()
        for block in self.blocks:  # last, so all methods start with the same weights of the rest of the model
            block.attention.method.reset_parameters()

    def plan(
        self,
        length: int,
        *,
        queries: int | None = None,
        target_length: int | None = None,
        backend: str = "auto",
        method: Method | None = None,
        document_token: int | None = None,
    ) -> Plan:
        """Return the plan for sequences of this length: backends, and what does not depend on weights.

        queries (default: all): the last tokens, whose outputs are wanted. target_length: see plan_layer. backend: its
        name, or auto. method: plan for another method than the trained one, such as YaRN for RoPE's weights. Only the
        plans of the two may differ (make_alternative). document_token: if given, attention stays within documents,
        which begin with this token.
        """
        device = self.head.device
        methods = [block.attention.method for block in self.blocks[: self.pattern_length]]  # most models have one
        if method is not None:
            methods = [method.to(device)]
        plans = {}
        for layer_method in methods:
            if layer_method.name not in plans:
                documents = document_token is not None
                chosen, why = choose_backend(layer_method, device, self.dtype, backend, documents)
                plans[layer_method.name] = plan_layer(
                    layer_method,
                    chosen,
                    queries or length,
                    length,
                    target_length=target_length,
                    device=device,
                    why=why,
                )
        return Plan(tuple(plans[layer_method.name] for layer_method in methods), document_token)

    def embed(self, tokens: Tensor) -> Tensor:
        return norm(self.embedding(tokens).to(self.dtype))

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        plan: Plan | None = None,
        per_token: bool = False,
        last: int | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy in nats of targets (B, T) given tokens (B, T), both int64.

        per_token: return the float32 losses (B, T) instead. Without targets: return the float32 logits of the last
        `last` positions (default: all), (B, last, vocabulary).
        """
        x = self.embed(tokens)  # (B, T, C)
        plan = (plan or self.plan(tokens.shape[1])).for_tokens(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, plan.for_layer(number))
        x = norm(x)
        if targets is None:
            return linear(x[:, -last:] if last else x, self.head).float()
        x, all_targets = x.flatten(0, 1), targets.flatten()
        if per_token:
            return token_losses(x, self.head, all_targets).view_as(targets)
        return mean_loss(x, self.head, all_targets)
