"""What outlives a campaign: findings, its state, journals; and saved cases run or merged later."""
