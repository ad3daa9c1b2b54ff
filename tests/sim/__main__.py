"""`python -m tests.sim SEED` replays a life; `--seeds A-B --minutes M` lives many, on all cores."""
from tests.sim.life import drawn, live
import sys, time
t=time.time()
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    o=live(drawn(seed))
    print(seed, o.crashes, o.steps, o.calls, o.broken, o.digest[:8], f"{time.time()-t:.2f}")
    if o.broken and len(sys.argv)>3:
        print("\n".join(o.history[-int(sys.argv[3]):])); break
