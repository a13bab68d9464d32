"""LightningModules that optimize manually, as their authors would write them."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Manual(L.LightningModule):
    """Base: ``example`` is a batch of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[float] = []

    @staticmethod
    def example(size: int) -> Any:
        return torch.randn(size, 8), torch.randn(size, 8)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(float(optimizer.param_groups[0]["lr"]))

    def norm(self) -> Tensor:
        return torch.stack([parameter.norm() for parameter in self.parameters()]).norm()

    @torch.no_grad()
    def on_train_end(self) -> None:
        """Looks at all weights, once more on rank 0, and divides them by their norm."""
        if self.global_rank == 0:
            assert self.norm() > 0
        norm = self.norm()
        for parameter in self.parameters():
            parameter.div_(norm)


class Gan(Manual):
    """A generator and a discriminator in turns, with random numbers, statistics and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.1), nn.Linear(16, 8)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(8, 16), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.2), nn.Linear(16, 1), nn.Sigmoid()
        )
        self.register_buffer("validation_z", torch.ones(4, 4))

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images = batch[0]
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(len(images), 4)
        valid, fake = torch.ones(len(images), 1), torch.zeros(len(images), 1)

        self.toggle_optimizer(optimizer_g)
        self.generated = self(z)
        loss_g = F.binary_cross_entropy(self.discriminator(self.generated), valid)
        self.log("loss_g", loss_g, prog_bar=True)
        self.manual_backward(loss_g)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = F.binary_cross_entropy(self.discriminator(images), valid)
        fake_loss = F.binary_cross_entropy(self.discriminator(self(z).detach()), fake)
        loss_d = (real_loss + fake_loss) / 2
        self.log("loss_d", loss_d, prog_bar=True)
        self.manual_backward(loss_d)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_score", self.discriminator(self(batch[0][:, :4])).mean())

    def on_train_epoch_end(self) -> None:
        self.log("sampled", self(self.validation_z).mean())

    def configure_optimizers(self) -> Any:
        parts = self.generator, self.discriminator
        return [torch.optim.Adam(part.parameters(), lr=2e-2, betas=(0.5, 0.999)) for part in parts], []


class Wgan(Manual):
    """Several steps of the critic for one of the generator, with a gradient penalty and clamped weights."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 8))
        self.critic = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))

    def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        mixed = torch.rand(len(real), 1)
        mixed = (mixed * real + (1 - mixed) * fake).requires_grad_()
        scores = self.critic(mixed)
        (gradient,) = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True, retain_graph=True)
        return ((gradient.norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        real = batch[0]
        for _ in range(2):
            with torch.no_grad():
                fake = self.generator(torch.randn(len(real), 4))
            loss = self.critic(fake).mean() - self.critic(real).mean() + 10 * self.penalty(real, fake)
            critic.zero_grad()
            self.manual_backward(loss)
            critic.step()
            for parameter in self.critic.parameters():
                parameter.data.clamp_(-0.3, 0.3)
        self.log("critic", loss)
        if batch_idx % 2 == 1:
            loss = -self.critic(self.generator(torch.randn(len(real), 4))).mean()
            generator.zero_grad()
            self.manual_backward(loss)
            generator.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.RMSprop(part.parameters(), 1e-3) for part in (self.generator, self.critic)]


class ActorCritic(Manual):
    """Target networks that follow, a temperature of its own, branches on numbers, and three optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        self.slow, self.hard = copy.deepcopy(self.critic), copy.deepcopy(self.critic)
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        actor, critic, alpha = self.optimizers()
        state, action = batch
        with torch.no_grad():
            after = self.actor(state)
            target = torch.minimum(self.slow(torch.cat((state, after), 1)), self.hard(torch.cat((state, after), 1)))
        loss_q = F.mse_loss(self.critic(torch.cat((state, action), 1)), state.sum(1, keepdim=True) + 0.9 * target)
        critic.zero_grad()
        self.manual_backward(loss_q)
        self.clip_gradients(critic, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        critic.step()

        chosen = self.actor(state)
        entropy = -chosen.square().mean()
        loss = -self.critic(torch.cat((state, chosen), 1)).mean() - self.log_alpha.exp().detach() * entropy
        actor.zero_grad()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.actor.parameters(), 0.1)
        actor.step()

        if entropy.item() < 0.5:
            alpha.zero_grad()
            self.manual_backward(self.log_alpha * entropy.detach())
            alpha.step()
        with torch.no_grad():
            for slow, parameter in zip(self.slow.parameters(), self.critic.parameters(), strict=True):
                slow.mul_(0.9).add_(parameter, alpha=0.1)
        if batch_idx % 2 == 0:
            self.hard.load_state_dict(self.critic.state_dict())
        self.log_dict({"q": loss_q, "entropy": entropy})

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.actor.parameters(), 1e-2),
            torch.optim.Adam(self.critic.parameters(), 1e-2),
            torch.optim.SGD([self.log_alpha], 1e-1),
        ]


class Accumulating(Manual):
    """One optimizer: gradients of two batches, two backwards of one graph, a schedule stepped by hand, skip
    connections and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x * self.scale, self.blocks[0][1].weight) + self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        inputs, targets = batch
        output = self(inputs)
        loss = F.mse_loss(output, targets)
        self.manual_backward(loss / 2, retain_graph=True)
        self.manual_backward(output.abs().mean() / 20)
        if batch_idx % 2 == 1:
            norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
            self.log("norm", norm)
            optimizer.step()
            optimizer.zero_grad()
        if self.trainer.is_last_batch:
            schedule.step()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss.detach()

    def on_train_epoch_end(self) -> None:
        assert self.lr_schedulers().get_last_lr()[0] <= 0.05

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


MODELS = (Gan, Wgan, ActorCritic, Accumulating)
