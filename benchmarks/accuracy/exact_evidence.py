"""The marginal likelihood of an exact process, and its maximum, by automatic differentiation. Cost: O(N^3)."""

import torch
from torch.distributions import MultivariateNormal

ITERATIONS = 30


def maximize(gp, objective):
    """Put the hyperparameters at the maximum of a log marginal likelihood per datum."""
    optimizer = torch.optim.LBFGS(gp.parameters(), max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = -objective()
        loss.backward()
        return loss

    optimizer.step(closure)


def evidence(gp, x, y):
    """The exact log marginal likelihood per datum."""
    cov = gp.kernel(x)
    cov = cov + torch.diag(1e-6 * cov.diagonal() + gp.likelihood.variance)
    return MultivariateNormal(gp.mean(x).reshape(-1), cov).log_prob(y) / len(x)
