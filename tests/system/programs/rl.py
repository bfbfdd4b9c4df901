"""Like reinforcement learning: many calls of the policy under no_grad, then a few training steps on what they gave."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.distributions import Categorical
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=8)
parser.add_argument("--rollout", type=int, default=64, help="calls of a round")
parser.add_argument("--updates", type=int, default=4, help="training steps of a round")
options = parser.parse_args()

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
truth = Truth()
for _ in range(options.rounds):
    state, states, actions, rewards = torch.zeros(1, 8), [], [], []
    truth.start()
    for _ in range(options.rollout):
        with torch.no_grad():
            action = Categorical(logits=policy(state)).sample()
        truth.calls += 1
        states.append(state)
        actions.append(action)
        state = (0.9 * state + 0.1 * torch.randn(1, 8)).clamp(-1, 1)
        rewards.append(-float(state.square().sum()))
        truth.lap("rollout", 1)
    gains = torch.tensor(rewards)
    gains = (gains - gains.mean()) / (gains.std() + 1e-6)
    truth.start()
    for _ in range(options.updates):
        logits = policy(torch.cat(states))
        loss = -(Categorical(logits=logits).log_prob(torch.cat(actions)) * gains).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.calls += 1
        truth.optimizer_steps += 1
        truth.lap("training", options.rollout)
truth.say(loss=round(loss.item(), 6))
