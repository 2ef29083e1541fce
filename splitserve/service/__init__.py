"""What every process shares: errors, configuration, logging, lifecycle, metrics. Imports none of ours."""
