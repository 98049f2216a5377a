"""What programs cost: contractions, chips, networks, lower bounds on time."""
