"""What every process of the cluster shares: errors, configuration, logging, lifecycle, metrics. Imports none of ours."""
