import sys
from kvoffload.testing.servers import *
from kvoffload.testing import servers as S
from kvoffload.testing.shared_memory import SharedMemoryMedium
import logging; logging.disable(logging.ERROR)
seed=int(sys.argv[1]); plan=plan_servers(seed)
s=Servers(plan,SharedMemoryMedium(seed,plan.is_calm))
try: s.run()
except BaseException as e: 
    import traceback; tb=e.__traceback__
    while tb:
        f=tb.tb_frame
        if f.f_code.co_name=="turn" and "self" in f.f_locals and isinstance(f.f_locals["self"],ModelEngine): eng=f.f_locals["self"]
        tb=tb.tb_next
    print(repr(e)); 
    sch=eng.scheduler; print("todo",len(eng._todo),"unrep",len(eng._unreported),"writes",[ (t.writes.has_backlog,t.writes.is_busy,t.writes.num_writing) for t in eng.tiered.tiers],"jobs",sch.jobs.jobs,"held",sch.held, "off", sch.off, sch.shelf.was_reset)
    print([r.request_id for r in eng.batcher.requests], [ (r.loading,r.in_flight,r.num_computed_tokens,r.blocks,r.waiting_since) for r in eng.batcher.requests], eng.clock.now, len(eng.batcher._cache.pool.free))
    print(eng.lower.life)
