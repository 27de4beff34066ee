"""What adjoints that differentiate the accepted steps share."""
