"""A modelled worker's shell around the real `agent.state_machine`: it makes the events and carries the commands out.

Forking, reaping, flushing and hosting a store take their time; the line to the operator breaks and is dialled again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from simulator.caretakers import Keeper
from simulator.drains import DrainRunner
from simulator.engine import Line, Process
from simulator.errands import Errands
from simulator.join_trials import JoinTrial
from simulator.tiers import Holder
from simulator.trainers import Trainer
from simulator.wiring import Wire
from surefoot.agent import agent_state as on
from surefoot.agent import staging_memory as saves
from surefoot.agent import state_machine as agent_life
from surefoot.agent.agent_process import ActivityReporter
from surefoot.flush import state_machine
from surefoot.protocol import messages as said
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot.protocol.messages import NodeHealth

if TYPE_CHECKING:
    from simulator.fabric import Pod
    from simulator.world import Simulation


class Agent:
    """One start of one worker's agent, on one node."""

    def __init__(self, simulation: Simulation, pod: Pod, node: str) -> None:
        self.simulation, self.pod, self.node = simulation, pod, node
        self.engine, self.network = simulation.engine, simulation.network
        self.incarnation = f"i{simulation.next_number()}"
        self.process = Process(f"agent {pod.name} {self.incarnation}", node)
        self.life = agent_life.AgentState(step_timeout_seconds=simulation.settings.step_timeout_seconds)
        self.trainers: list[Trainer] = []
        self._paces = ActivityReporter()
        self.drains: dict[int, DrainRunner] = {}
        self.line: Line | None = None
        self.endpoints: tuple[MemoryServerEndpoint, ...] = ()
        self._targets: on.Retarget | None = None
        self._done: dict[Checkpoint, dict[int, int]] = {}
        self.saved: tuple[Checkpoint, int] | None = None
        self.book = saves.SaveTracker()
        self._errands = Errands(self)
        rng = self.engine.rng
        self.engine.after(rng.uniform(0.01, 0.2), self.process, self.dial)
        self._trial = JoinTrial(self)
        warm_seconds = rng.choice((0.02, 0.5, 1.0, 1.5))
        self.engine.after(self._trial.joins_after(warm_seconds), self.process, self.warm, True)
        self.keeper = Keeper(self)
        self.engine.after(0.5, self.process, self._beat_forever)

    # ---- the line ---------------------------------------------------------------------------------------------------

    def dial(self) -> None:
        if self.line is not None:
            return
        operator = self.simulation.listening(lagging=True)
        if operator is None or not self.network.reaches(self.node, operator.process.site):
            self.engine.after(self.engine.rng.uniform(0.1, 0.4), self.process, self.dial)
            return
        wire = Wire() if self.simulation.settings.encoded else None
        self.line = Line(self.network, self.process, operator.process, wire)
        self.line.hear[self.process] = self._hear
        line = self.line
        self.line.broken[self.process] = lambda: self._broken(line)
        operator.accept(self.line)
        self.line.send(
            self.process,
            said.Hello("job", self.pod.index, self.pod.attempt, self.incarnation, self.node, "",
                       self.life.running_generation, self.life.stopped_below, self.life.is_warm, self.life.store_address),
        )  # fmt: skip

    def _broken(self, line: Line) -> None:
        if self.line is line:
            self.line = None
            self.engine.after(self.engine.rng.uniform(0.02, 0.2), self.process, self.dial)

    def redial(self) -> None:
        """The operator moved: its address answers no more for the old one."""
        if self.line is not None:
            line, self.line = self.line, None
            line.close(self.process)
            self.engine.after(self.engine.rng.uniform(0.02, 0.5), self.process, self.dial)

    def say(self, message: said.FromAgent) -> None:
        if self.line is not None:
            self.line.send(self.process, message)

    def say_findings(self) -> None:
        """What this node suffers from, if anything."""
        findings = (*self.simulation.fabric.nodes[self.node].findings, *self._trial.findings)
        if findings:
            self.say(NodeHealth(findings))

    def _beat_forever(self) -> None:
        self.beat()
        self.keeper.look()
        self.tell(on.Ticked(self.engine.now))
        self.engine.after(0.5, self.process, self._beat_forever)

    @property
    def leaving(self) -> bool:
        """Whether it says that it was told to end."""
        return self.life.termination_exit_code is not None

    def beat(self) -> None:
        life = self.life
        pending = sorted({c for d in self.drains.values() for c in d.state.pending_checkpoints()})
        settled = self.book.closed_steps(
            life.started_generation, len(life.ranks), life.progress.closed_steps.closed_up_to
        )
        paces = self._paces.select_unsent(life.progress.activities, self.engine.now)
        self.say(
            said.Heartbeat(
                generation=life.running_generation, stopped=life.stopped_below, is_warm=life.is_warm,
                pending=tuple(pending), saved=self.saved[0] if self.saved else None,
                copies=self.saved[1] if self.saved else 0, progress=replace(life.progress, closed_steps=settled, activities=paces),
                terminating=self.leaving,
            )
        )  # fmt: skip

    def _hear(self, message: said.ToAgent) -> None:
        match message:
            case said.Welcome():
                self.tell(message)
                self.say_findings()
            case said.StopTrainers() | said.Assign() | said.MemoryServers() | said.Barrier() | said.IntervalExponent():
                self.tell(message)
            case said.Shutdown(_, exit_code):
                self.tell(on.ShutdownRequested(exit_code))
            case said.ListPersistent(request, manifests=False, layouts=wanted):
                self._errands.tell_layouts(request, wanted or ())
            case said.ListPersistent():
                self._errands.tell_listing(message)
            case said.RepairSave():
                self._errands.repair(message)
            case said.UploadSave(saves=saves):
                self._errands.upload(saves)
            case said.DeletePersistent(request, checkpoints):
                self._errands.drop_persistent(request, checkpoints)
            case said.HelloRejected(_, retry):
                if not retry:
                    self.tell(on.ShutdownRequested(1))

    # ---- life -------------------------------------------------------------------------------------------------------

    def warm(self, warm: bool) -> None:
        """Trainers can, or cannot, be forked at once."""
        self.tell(on.WarmChanged(warm))

    def tell_trainer(self, event: on.Event) -> None:
        """From a trainer over its socket: arrives a little later, in order."""
        self.engine.after(0.0004, self.process, self.tell, event)

    def tell(self, event: on.Event) -> None:
        self.life, commands = agent_life.next_state(self.life, event)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: on.Command) -> None:
        rng = self.engine.rng
        match command:
            case on.Send(message):
                self.say(message)
            case on.SendHeartbeat():
                self.beat()
            case on.StartStore(epoch):
                self.engine.after(
                    rng.uniform(0.01, 0.05), self.process, self.tell, on.StoreStarted(epoch, f"{self.node}:{epoch}")
                )
            case on.StartTrainers(assign, store):
                self._start(assign, store)
            case on.CollectStacks(epoch):
                self.engine.after(rng.uniform(0.01, 1.5), self.process, self._look, epoch)
            case on.KillTrainers():
                if self.simulation.rules.reap:
                    for trainer in self.trainers:
                        self.engine.after(rng.uniform(0.001, 0.02), self.process, trainer.kill)
                else:
                    for trainer in self.trainers:
                        self.engine.after(0.01, self.process, self.exited, trainer, -9, "", False)
            case on.SendToTrainers(message, rank):
                for trainer in self.trainers:
                    if rank in (None, trainer.rank):
                        delay = rng.uniform(0.0004, 0.4) if isinstance(message, said.IntervalExponent) else 0.0004
                        self.engine.after(delay, trainer.process, trainer.receive, message)
            case on.Retarget(holders):
                self._retarget(holders)
            case on.Flush(epoch):
                self._flush(epoch, self.engine.now + 3.0)
            case on.Exit(code):
                self.simulation.fabric.left(self, code)
            case _:
                pass

    def _look(self, epoch: int) -> None:
        look = self.simulation.hang_watch.look(self, epoch)
        self.tell(on.StacksCollected(epoch, "in a test", look))

    def _start(self, assign: said.Assign, store: str) -> None:
        self.simulation.oracle.training.starting(self, assign)
        for runner in self.drains.values():
            runner.tell(state_machine.GenerationStarted(assign.generation))
        self.trainers = [Trainer(self, assign, store, local) for local in range(assign.local_ranks)]
        for trainer in self.trainers:
            self.engine.after(self.engine.rng.uniform(0.05, 0.3), trainer.process, trainer.begin)

    def exited(self, trainer: Trainer, code: int, cause: str, secondary: bool) -> None:
        self.engine.after(
            0.001,
            self.process,
            self.tell,
            on.TrainerExited(trainer.assign.generation, trainer.local, code, cause, secondary),
        )

    def _flush(self, epoch: int, deadline: float) -> None:
        if self.engine.now < deadline and any(d.state.is_busy() for d in self.drains.values()):
            self.engine.after(0.05, self.process, self._flush, epoch, deadline)
            return
        self.tell(on.Flushed(epoch))

    def kill_all(self, silent: bool = False) -> None:
        """The worker's processes end together: trainers die with their agent."""
        self.engine.kill(self.process, silent)
        for trainer in self.trainers:
            trainer.kill(silent)

    # ---- saves ------------------------------------------------------------------------------------------------------

    def holder(self, target: MemoryServerInstance) -> Holder | None:
        """Where an endpoint leads: that instance while it lives, else nobody who knows us."""
        return self.simulation.holders.get(target)

    @property
    def partly_told(self) -> int:
        """The epoch of which there are more holders than it was told of; 0: those are all."""
        holders = self._targets.servers if self._targets is not None else None
        return holders.generation if holders is not None and holders.is_partial else 0

    def stage(self, trainer: Trainer, save: RankSave, content: int) -> bool:
        runner = self.drains.get(trainer.local)
        if runner is None:
            runner = self.drains[trainer.local] = DrainRunner(self, self._freed)
            self._aim(runner, trainer.local)
        self.book = saves.track_staged(self.book, save)
        self.engine.after(0.0004, self.process, self.beat)  # what is pending must be known before anybody says Stopped
        staged = runner.stage(save, trainer.assign.world_size, content)
        if not staged:
            self.book = saves.track_lost(self.book, save)
            self.simulation.oracle.liveness.not_staged(self, save, runner.state)
        return staged

    def _retarget(self, holders: said.MemoryServers) -> None:
        self._targets = on.Retarget(holders)
        self.endpoints = holders.servers
        for local, runner in self.drains.items():
            self._aim(runner, local)

    def _aim(self, runner: DrainRunner, local: int) -> None:
        if self._targets is None:
            return
        holders = self._targets.servers
        everyone = frozenset(e.instance for e in holders.servers)
        runner.tell(
            state_machine.Retargeted(holders.targets_of_rank(local), everyone, holders.replicas, self.engine.now)
        )

    def _freed(self, freed: state_machine.FreeSlot) -> None:
        save = freed.save
        if freed.lost:
            self.book = saves.track_lost(self.book, save)
        if not freed.ok:
            return
        ranks = self._done.setdefault(save.checkpoint, {})
        ranks[save.rank] = freed.copies
        if len(ranks) >= self.simulation.settings.local_ranks and (
            self.saved is None or save.checkpoint > self.saved[0]
        ):
            self.saved = (save.checkpoint, min(ranks.values()))
            self.beat()
