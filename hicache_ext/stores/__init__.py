"""Remote tiers: stores of objects that outlive the process or are shared with other machines."""
