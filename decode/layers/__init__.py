"""What a `TreeCache` keeps of the text in each kind of layer, and how recurrent layers read token trees."""
