"""The same work on many devices: worker processes of this machine, or Ray's of many.

generate.generate_many   a dataset by all workers of a pool
pool.Pool                what a pool of workers is; processes.ProcessPool and ray_pool.RayPool are two
ray_connect.connect      Ray, or a clear error in seconds

Nothing is imported here: Ray and torch load only where they are needed.
"""
