"""glmmTMB and fields, R packages, on data written to a file: estimates as a dictionary of numbers.

glmmTMB takes the Matérn-3/2 covariance (``mat`` with its smoothness fixed) and maximizes Laplace's approximation of the
likelihood; ``fields::spatialProcess`` maximizes the likelihood of Gaussian data. Both write Matérn's range without the
factor sqrt(3) of a lengthscale. Debian has them: ``apt-get install r-cran-glmmtmb r-cran-fields r-cran-sp``.
"""

import csv
import shutil
import subprocess
import tempfile
from pathlib import Path

SKIPPED = "Rscript is absent: rows of R packages are left out."

_GLMMTMB = """
suppressMessages(library(glmmTMB))
args <- commandArgs(TRUE); d <- read.csv(args[1])
d$pos <- numFactor(d$x1, d$x2); d$one <- factor(rep(1, nrow(d)))
grouped <- "group" %in% names(d)
plain <- !("a" %in% names(d))
formula <- if (grouped) y ~ a + b + mat(pos + 0 | one) + (1 | group) else y ~ a + b + mat(pos + 0 | one)
if (plain) formula <- y ~ 1 + mat(pos + 0 | one)
if (grouped) d$group <- factor(d$group)
family <- list(Poisson = poisson(), Bernoulli = binomial(), Gaussian = gaussian())[[args[2]]]
theta <- c(log(.7), log(.2 / sqrt(3)), log(1.5)); free <- c(1, 2, NA)
if (grouped) { theta <- c(theta, log(.5)); free <- c(free, 3) }
start <- proc.time()
fit <- glmmTMB(formula, d, family = family, start = list(theta = theta), map = list(theta = factor(free)))
seconds <- sum((proc.time() - start)[1:2])
theta <- fit$obj$env$parList()$theta; se <- sqrt(diag(vcov(fit)$cond)); b <- fixef(fit)$cond
show <- function(name, value) cat("=", name, ",", format(value, digits = 10), "\\n", sep = "")
for (i in seq_along(b)) { show(c("intercept", "slope 1", "slope 2")[i], b[i]) ; show(c("se intercept", "se slope 1", "se slope 2")[i], se[i]) }
show("variance", exp(2 * theta[1])); show("lengthscale", sqrt(3) * exp(theta[2]))
if (grouped) show("group_scale", exp(theta[4]))
if (args[2] == "Gaussian") show("noise", sigma(fit))
show("log likelihood", as.numeric(logLik(fit))); show("seconds", seconds)
"""  # noqa: E501

_MEUSE = """
suppressMessages({library(sp); library(fields)})
data(meuse); x <- cbind(meuse$x, meuse$y) / 1000; y <- log(meuse$zinc)
write.csv(data.frame(x1 = x[, 1], x2 = x[, 2], y = y), commandArgs(TRUE)[1], row.names = FALSE)
start <- proc.time()
fit <- suppressMessages(spatialProcess(x, y, smoothness = 1.5, mKrig.args = list(m = 1), REML = FALSE, verbose = FALSE))
seconds <- sum((proc.time() - start)[1:2]); s <- fit$summary
show <- function(name, value) cat("=", name, ",", format(value, digits = 10), "\\n", sep = "")
show("variance", s["sigma2"]); show("lengthscale", sqrt(3) * s["aRange"]); show("noise", s["tau"])
show("log likelihood", s["lnProfileLike.FULL"]); show("seconds", seconds)
"""


def has_r():
    """Whether Rscript is there."""
    return shutil.which("Rscript") is not None


def glmmtmb(columns, kind):
    """Estimates of coefficients, their standard errors, hyperparameters, log likelihood and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
        return _run(_GLMMTMB, str(path), kind)


def labels(columns):
    """Estimates of an intercept and a process of single labels."""
    return glmmtmb(columns, "Bernoulli")


def meuse():
    """Maximum-likelihood estimates of fields on log zinc, and the rows (x1, x2 in km, y)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "meuse.csv"
        found = _run(_MEUSE, str(path))
        with path.open(newline="", encoding="utf-8") as file:
            rows = [[float(value) for value in row] for row in list(csv.reader(file))[1:]]
    return found, rows


def _run(script, *args):
    done = subprocess.run(["Rscript", "-e", script, *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    lines = [line[1:].rsplit(",", 1) for line in done.stdout.splitlines() if line.startswith("=")]
    return {name: float(value) for name, value in lines}
