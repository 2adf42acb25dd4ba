import sys,time
from kvoffload.testing.servers import simulate_servers
from kvoffload.testing.shared_memory import SharedMemoryMedium
from kvoffload.testing.simulation import run_each
a,b=int(sys.argv[1]),int(sys.argv[2])
t=time.process_time()
if b==1: 
    print(simulate_servers(SharedMemoryMedium,a)); sys.exit()
r=run_each(range(a,a+b),lambda s: simulate_servers(SharedMemoryMedium,s))
for k,v in sorted(r.counts.items()): print(f"{v:>10} {k}")
for k,v in r.failures.items(): print(k,v)
print(time.process_time()-t)
