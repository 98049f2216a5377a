"""What programs cost: contractions, networks, lower bounds on time."""
