"""Where rank saves are kept. `Tier` is the whole surface; redis, directory and s3 implement it, one contract suite holds them."""

from surefoot.tiers.tier import Tier as Tier
