"""Files that outlive a campaign: findings, its state, journals; and saved cases run or merged later."""
