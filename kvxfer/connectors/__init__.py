"""Other people's interfaces on kvxfer's transport. Each connector decides how one foreign vocabulary maps onto ours."""
