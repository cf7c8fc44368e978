"What is promised, and what does it cost?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "accounting": """
        PrivacyPlan RDPAccountant epsilon noise_multiplier rdp_gaussian rdp_to_epsilon""",
    "budget": """
        Budget CLOSED check_accountant check_budget check_chance check_plan_numbers check_rest
        check_unit composed counted falling_root history_of in_digits in_list looks_before
        multipliers plain_numbers plan_in_words read_looks round_up steps_of""",
    "correlated": """
        BandedNoise IndependentNoise banded_coefficients batch_indices charged check_bands
        cyclic_groups cyclic_indices inverse_coefficients momentum_workload noise_kind noise_of
        participations prefix_variances square_root_coefficients""",
    "definition": """
        gaussian_mechanism gaussian_tpr hockey_stick laplace_mechanism max_tpr
        randomized_response randomized_response_mean""",
    "gaussian": """
        as_tensor check_eps check_generator check_scale gaussian_delta gaussian_epsilon
        gaussian_sigma""",
    "pld": """
        Accountant ComposedLoss HockeyStick LossGrid ORDERS PLDAccountant TILTS
        excess_by_quadrature log_sum_exp loss_masses privacy_loss rdp_sampled_gaussian
        read_divergences read_orders require""",
    "randomness": """
        SecretSeed Stream keyed_digest new_seed normal step_generator""",
    "sampling": """
        poisson_indices""",
    "search": """
        RandomStopping Search search_epsilon search_noise_multiplier""",
})
