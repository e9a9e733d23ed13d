"""Integer maths of the data layout: slots, tiles and the shapes of buffers."""
