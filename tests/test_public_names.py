"""The public names of the package and of its rooms, so that a name that no user needs cannot leak out unnoticed."""

import importlib
import inspect
import pkgutil

import pytest

import pyro_nngp

METHODS = "BSGP LMC LOO NPVI SVGP SWSGP VNNGP CoregionalizedLOO MLLk Vecchia"

NAMES = {
    "adapters": "",
    "adapters.botorch": "DrawnPosterior NearestNeighborModel",
    "adapters.maps": "predict_grid",
    "adapters.plots": """
        plot_band plot_dependence plot_fit plot_map plot_neighbors plot_relevance plot_residuals
        plot_scores plot_variogram
    """,
    "adapters.sklearn": "NNGPClassifier NNGPCountRegressor NNGPRegressor",
    "conditionals": "graph_conditional nn_conditional whitened_conditional",
    "data": """
        auc bathymetry block_split breast_cancer brier coverage crps_gaussian crps_sample Dataset diabetes digits
        error_rate flights gaussian_interval interval_score load lon_lat nll random_split rmse Standardizer terrain
        uci union_of_sites
    """,
    "distributed": "join_group ParquetColumns ProcessError ShardedData World",
    "distributions": """
        FullScaleNNGP FullScaleReparam GeneralizedPareto InverseGaussian Mixture NNGP NNGPReparam NormalLaplace
        PolyaGamma SparseCholeskyNormal Tweedie in_plate
    """,
    "hyperparameters": """
        assign between bound_copy check_same_sites freeze GPModule Hyperparameter HyperparameterGuide
        lognormal_priors positive release Scaled scaled Unset
        unset_hyperparameters
    """,
    "inducing": "Determinantal InducingPrior kmeans SparseLayer Strauss",
    "inference": """
        AutoNNGP Checkpoint CheckpointError compare_to_exact ConvergenceWarning coverage_curve cross_validate
        CrossValidation Cyclical DivergenceError elpd fit FitResult IntegratedELBO Minibatch NNReport pit
        plot_coverage plot_pit plot_reliability PointwiseLogLikelihood PolyaGammaGibbs PolynomialDecay
        PredictiveLogLikelihood psis_khat QuickNUTS Recorder Reliability reliability RowAdam sbc_ranks sbc_to_arviz
        Schedule Score SGHMC SGLD SGMCMC SGNHT step_size_refinement symmetry to_arviz uniformity Validation
    """,
    "kernels": """
        ArcCosine bind Constant Cosine Covariance Gibbs Gneiting Kernel KernelMetric Linear Matern Matern12 Matern32
        Matern52 neighbor_metric Periodic Product RationalQuadratic RBF Rotation Stationary Sum VerticalScaling Warped
        Wendland Wrapper
    """,
    "likelihoods": """
        AsymmetricLaplace Bernoulli Beta BetaBinomial Binomial binomial_splits BinomialSplit Categorical Censored
        Gamma Gaussian GeneralizedPareto HeteroskedasticGaussian Hurdle IntervalCensored InverseGaussian Likelihood
        log_shares LogNormal Marginal Multinomial NegativeBinomial Occupancy Ordinal PerOutput Poisson PolyaGammaBound
        StudentT Tweedie ZeroInflated ZeroTruncated
    """,
    "linalg": """
        add_diagonal cholesky DEFAULT_JITTER factor_inverse factor_log_det factor_solve half_solve in_blocks
        NotPositiveDefiniteError report_nuggets reverse_cholesky solve_triangular VecchiaFactor
    """,
    "loadings": "Correlations FactorLoadings",
    "means": "BasisMean ConstantMean LinearMean",
    "models": METHODS,
    "models.base": "Draw Fantasies Method Observed Posterior Program Samples",
    "neighbors": """
        Batch make_ordering nearest nearest_predecessors NearestOthers NeighborGraph NeighborTable SearchIndex
        SymmetricGraph time_ordering
    """,
    "plausibility": "",
    "starts": "",
    "storage": "load ModelFileError save",
    "variational": """
        Amortized AmortizedGaussian combined combined_variance Conjugate conjugate_posterior DenseGaussian factor
        FullRank GivenGaussian InducingLeaveOneOut LatentLeaveOneOut LocalConjugate LocalGaussian LocalLogNormal
        LocalTables LogNormal MeanField neighbor_variance ObservedGaussian prior_factor PseudoObservations scattered
        SparseCholesky
        variational_optimum
    """,
    "variational.encoders": """
        ConditionalEncoder GraphConvolutionEncoder Neighborhood observed rough_latent Row SiteEncoder
    """,
}
WITHOUT = {"gpu", "native", "neighbors.search"}  # rooms of which users need no name


@pytest.mark.parametrize("room", NAMES)
def test_a_room_shows_only_its_public_names(room):
    module = importlib.import_module(f"pyro_nngp.{room}")
    assert sorted(module.__all__) == sorted(NAMES[room].split())
    assert all(hasattr(module, name) for name in module.__all__)
    if module.__file__.endswith("__init__.py"):  # a front imports nothing else
        shown = {name for name, value in vars(module).items() if not inspect.ismodule(value)}
        assert {name for name in shown if not name.startswith("_")} == set(module.__all__)


def test_the_front_door_shows_methods_and_rooms():
    rooms = "data distributed distributions inference kernels likelihoods models neighbors variational"
    own = "FullScaleNNGP FullScaleReparam NeighborGraph NNGP NNGPReparam"
    names = f"{METHODS} {rooms} {own} AutoNNGP cross_validate fit load predict_grid to_arviz __version__"
    assert sorted(pyro_nngp.__all__) == sorted(names.split()) == sorted(dir(pyro_nngp))
    values = {name: value for name, value in vars(pyro_nngp).items() if not name.startswith("_")}
    assert {name for name, value in values.items() if not inspect.ismodule(value)} <= set(pyro_nngp.__all__)


def test_every_room_is_listed():
    found = [name for _, name, is_package in pkgutil.walk_packages(pyro_nngp.__path__, "pyro_nngp.") if is_package]
    rooms = {name.removeprefix("pyro_nngp.") for name in found if not name.startswith("pyro_nngp.inference.")}
    assert rooms - NAMES.keys() == WITHOUT
