//! The masters that are known, and which of them calls go to.
//!
//! ```text
//!                 ┌── a call failed as if it did not lead ──► search (one for all calls) ──┐
//!  route: direct ─┤                                              │ asks who leads          │
//!     ▲           └── stays while a read-only leader refuses     │ (search.rs)             │
//!     ├───────────────────── it answers itself ◄─────────────────┤                         │
//!  route: passed on by a standby ◄── it does not, and a standby says that it leads         │
//!     └── every two seconds it is asked again ──► direct         └── nobody leads: pause ◄──┘
//! ```

use super::known::Known;
use super::master::{Carry, Master};
use super::search;
use crate::clock::Deadline;
use crate::errors::{ConnectError, ControlError, is_about_the_token};
use kvpool_auth::Credentials;
use kvpool_etcd::discover::Location;
use kvpool_tls::{ClientTls, TLS_SCHEME};
use kvpool_types::{Code, Epoch};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The most masters that are known at a time, those that were given aside.
const MOST_LEARNED: usize = 16;
/// How often a leader that only a standby reaches is tried directly.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);
/// How often a standby is asked whether the leader that it passes a call on to still leads.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// How long etcd may take to say where the masters are, each of its endpoints.
const DISCOVERY: Duration = Duration::from_millis(500);
/// How often it is asked.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(1);
/// The least time between two searches while only a read-only leader is known.
const SEARCH_PAUSE: Duration = Duration::from_millis(100);

/// Where calls go.
#[derive(Clone, Debug)]
pub(super) struct Route {
    /// The master that is called.
    pub(super) master: Arc<Master>,
    /// The leader, where it does not answer and `master` passes calls on to it.
    pub(super) leader: Option<Arc<Master>>,
    /// The leader answers only what changes nothing.
    pub(super) read_only: bool,
    /// The number of the route; each new route gets the next.
    number: u64,
}

impl Route {
    /// A route that has not been taken yet.
    pub(super) const fn to(master: Arc<Master>, leader: Option<Arc<Master>>) -> Self {
        Self {
            master,
            leader,
            read_only: false,
            number: 0,
        }
    }

    /// The same to a leader that answers only what changes nothing.
    pub(super) fn to_read_only(master: Arc<Master>) -> Self {
        Self {
            read_only: true,
            ..Self::to(master, None)
        }
    }

    /// Whether both lead to the same place in the same way.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let leader = |route: &Self| route.leader.as_ref().map(|leader| leader.address.clone());
        self.master.address == other.master.address && leader(self) == leader(other)
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Masters {
    known: Arc<Known>,
    /// Where masters are announced, besides those that were given by address.
    announced: Vec<Location>,
    spin: Duration,
    credentials: Credentials,
    tls: Option<ClientTls>,
    background: Handle,
    /// What carries all calls in a simulation.
    carrier: Option<Arc<dyn Carry>>,
    state: Mutex<State>,
    /// Told whenever a search came to something: to a route, or to nobody. It wakes calls in the order in which they
    /// began to wait; a watch channel wakes them in random order.
    heard: Notify,
}

#[derive(Debug)]
struct State {
    /// Those that were given, then those that were learned.
    masters: Vec<Arc<Master>>,
    given: usize,
    /// `None`: nobody has been found yet.
    route: Option<Route>,
    /// How many routes there were.
    routes: u64,
    /// Whether calls may take the route; else they wait for the search.
    usable: bool,
    /// How the route failed.
    failed: Option<Code>,
    seeking: bool,
    /// How many calls wait for a route.
    waiting: usize,
    /// What the last search that found nobody has to say.
    nobody: Option<ControlError>,
    /// When a leader that is not reached is tried directly again.
    probe_at: Instant,
    searched_at: Option<Instant>,
    discovered_at: Option<Instant>,
    /// Why master discovery through etcd failed, the last time.
    undiscovered: Option<String>,
    /// Where the next search begins.
    turn: usize,
}

/// A call that waits for a route. While there are any the search goes on.
struct Waiting<'a>(&'a Masters);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        debug_assert!(state.waiting > 0, "a call stopped waiting that never began");
        state.waiting -= 1;
    }
}

impl Masters {
    /// The masters at `addresses`. Of several, nobody is called before it is known who leads.
    pub(super) fn new(
        addresses: &[String],
        spin: Duration,
        credentials: Credentials,
        tls: Option<ClientTls>,
        known: Arc<Known>,
        background: Handle,
        carrier: Option<Arc<dyn Carry>>,
    ) -> Result<Arc<Self>, ConnectError> {
        let (announced, direct): (Vec<_>, Vec<_>) = addresses
            .iter()
            .partition(|address| Location::is_meant_by(address));
        let announced = announced.into_iter().map(|url| {
            Location::parse(url).map_err(|error| ConnectError::BadAddress {
                address: url.clone(),
                reason: error.to_string(),
            })
        });
        let announced = announced.collect::<Result<Vec<_>, _>>()?;
        let masters = direct
            .into_iter()
            .map(|address| {
                let carrier = carrier.clone();
                Master::new(
                    address,
                    spin,
                    &credentials,
                    tls.as_ref(),
                    &background,
                    carrier,
                )
                .map(Arc::new)
            })
            .collect::<Result<Vec<_>, _>>()?;
        if addresses.is_empty() {
            return Err(ConnectError::NoMasters);
        }
        // A single one need not be asked whether it leads before it is called.
        let alone = announced.is_empty() && masters.len() == 1;
        let first = masters.first().filter(|_| alone);
        Ok(Arc::new(Self {
            known,
            announced,
            spin,
            credentials,
            tls,
            background,
            carrier,
            heard: Notify::new(),
            state: Mutex::new(State {
                route: first.map(|first| Route::to(Arc::clone(first), None)),
                routes: 0,
                given: masters.len(),
                usable: alone,
                masters,
                failed: None,
                seeking: false,
                waiting: 0,
                nobody: None,
                probe_at: Instant::now(),
                searched_at: None,
                discovered_at: None,
                undiscovered: None,
                turn: 0,
            }),
        }))
    }

    /// How addresses that ask for TLS are called.
    pub(super) const fn tls(&self) -> Option<&ClientTls> {
        self.tls.as_ref()
    }

    /// Where calls go now, after the search for it when there is one.
    pub(super) async fn route(self: &Arc<Self>, deadline: Deadline) -> Result<Route, ControlError> {
        let (_waiting, mut heard) = {
            let mut state = self.state.lock();
            if let Some(route) = state.usable_route() {
                self.probe_when_due(&mut state);
                return Ok(route);
            }
            state.waiting += 1;
            self.search_on(&mut state);
            (Waiting(self), Box::pin(self.heard.notified()))
        };
        loop {
            let waited = deadline.run(heard.as_mut()).await;
            let mut state = self.state.lock();
            if let Some(route) = state.usable_route() {
                return Ok(route);
            }
            let refused = state.nobody.as_ref();
            let refused = refused.filter(|nobody| is_about_the_token(nobody.code));
            if waited.is_err() || refused.is_some() {
                return Err(state.nobody.clone().unwrap_or_else(|| {
                    let why = "no kvmaster has said yet who leads";
                    ControlError::new(Code::DeadlineExceeded, why)
                }));
            }
            // It ended for want of calls that wait, just before this one did.
            self.search_on(&mut state);
            heard.set(self.heard.notified());
        }
    }

    /// A call by `route` failed with `code`, as calls do on a master that is gone or does not lead.
    /// Of all calls that find so, the first begins the search.
    pub(super) fn doubt(self: &Arc<Self>, route: &Route, code: Code) {
        let mut state = self.state.lock();
        if state.number() != route.number {
            return;
        }
        // What a read-only leader does answer is still asked of it.
        let stays = route.read_only && code == Code::NotLeader;
        state.usable &= stays;
        state.failed = Some(code);
        self.search_on(&mut state);
    }

    /// Whether the leader that calls go to answers only what changes nothing.
    pub(super) fn are_read_only(&self) -> bool {
        let state = self.state.lock();
        state.usable_route().is_some_and(|route| route.read_only)
    }

    /// Somebody else speaks of a term that no master here has named: they are asked, while calls go
    /// on.
    pub(super) fn look_about(self: &Arc<Self>) {
        self.search_on(&mut self.state.lock());
    }

    /// Returns once `route`, by which a standby passes calls on, is out of date; says why.
    pub(super) async fn outdated(&self, route: &Route) -> String {
        let Some(leader) = &route.leader else {
            return std::future::pending().await;
        };
        loop {
            tokio::time::sleep(WATCH_INTERVAL).await;
            let limit = Deadline::after(WATCH_INTERVAL);
            match route.master.ask(self.known.caller(None), limit).await {
                Ok(reply) if reply.leader == leader.address => {}
                Ok(_) => return format!("{} leads no more", leader.address),
                Err(error) => return error.message,
            }
        }
    }

    /// Whether the master at `address` is not called for want of TLS.
    pub(super) fn refuse(&self, address: &str) -> bool {
        !address.starts_with(TLS_SCHEME) && self.tls.as_ref().is_some_and(ClientTls::refuses_plain)
    }

    /// Who asks, and in which term.
    pub(super) fn known(&self) -> &Known {
        &self.known
    }

    /// The master at `address`, learned of now if need be; `None` for what is no address, and when
    /// too many are known.
    pub(super) fn at(&self, address: &str) -> Option<Arc<Master>> {
        let mut state = self.state.lock();
        let known = state.masters.iter().find(|known| known.address == address);
        if let Some(master) = known {
            return Some(Arc::clone(master));
        }
        if state.masters.len() >= state.given + MOST_LEARNED {
            return None;
        }
        let (credentials, tls) = (&self.credentials, self.tls.as_ref());
        let master = Master::new(
            address,
            self.spin,
            credentials,
            tls,
            &self.background,
            self.carrier.clone(),
        );
        let master = master.map(Arc::new);
        let master =
            master.inspect_err(|error| tracing::warn!(%error, "invalid master address, ignored"));
        state.masters.extend(master.as_ref().ok().cloned());
        master.ok()
    }

    /// Takes note of the masters that the one at `by` names. Masters that were learned
    /// before and that it does not name are forgotten. An empty list changes nothing.
    pub(super) fn learn(&self, by: &str, addresses: &[&str]) {
        if addresses.is_empty() {
            return;
        }
        {
            let state = &mut *self.state.lock();
            let given = state.given;
            let called = state.route.as_ref();
            let called = called.map_or_else(String::new, |route| route.master.address.clone());
            let mut place = 0;
            state.masters.retain(|master| {
                place += 1;
                let address = master.address.as_str();
                let kept = [by, &called];
                place <= given || kept.contains(&address) || addresses.contains(&address)
            });
        }
        for address in addresses {
            self.at(address);
        }
    }

    /// The masters in the order to ask them; each call starts with another one. In the first round of a
    /// search a master that said it does not lead comes first, since it may know the leader. A master
    /// that did not answer comes last.
    pub(super) fn in_order(&self, first_round: bool) -> Vec<Arc<Master>> {
        let mut state = self.state.lock();
        state.turn = state.turn.wrapping_add(1);
        let mut order = state.masters.clone();
        let turn = state.turn % order.len().max(1);
        order.rotate_left(turn);
        if let Some(code) = state.failed.filter(|_| first_round)
            && let Some(route) = &state.route
        {
            let about = route.leader.as_ref().unwrap_or(&route.master);
            let answered = !matches!(code, Code::Unreachable | Code::DeadlineExceeded);
            let is_about = |master: &Arc<Master>| master.address == about.address;
            order.sort_by_key(|master| is_about(master) != answered);
        }
        order
    }

    /// The address of the master that failed last.
    pub(super) fn failed(&self) -> Option<String> {
        let state = self.state.lock();
        let route = state.route.as_ref().filter(|_| state.failed.is_some());
        route.map(|route| route.master.address.clone())
    }

    /// A search came to a route.
    pub(super) fn found(&self, route: Route) {
        let mut state = self.state.lock();
        state.seeking = false;
        self.take(&mut state, route);
    }

    /// A search came to nobody. Whether it is to go on: somebody waits for it.
    pub(super) fn found_nobody(&self, mut why: ControlError) -> bool {
        let mut state = self.state.lock();
        if let Some(more) = &state.undiscovered {
            why.message = format!("{}; {more}", why.message);
        }
        if state.nobody.as_ref() != Some(&why) {
            tracing::debug!(%why, "no usable master");
        }
        state.nobody = Some(why);
        state.seeking = state.waiting > 0 && !state.usable;
        self.heard.notify_waiters();
        state.seeking
    }

    /// Calls go by `route` from now on.
    fn take(&self, state: &mut State, route: Route) {
        let before = state.usable_route();
        if before.is_none_or(|before| !before.is_like(&route)) {
            tracing::debug!(
                master = route.master.address,
                leader = route.leader.as_ref().map(|leader| &leader.address),
                read_only = route.read_only,
                "route to the leader changed"
            );
        }
        state.routes += 1;
        let number = state.routes;
        state.route = Some(Route { number, ..route });
        state.usable = true;
        state.failed = None;
        state.nobody = None;
        state.probe_at = Instant::now() + PROBE_INTERVAL;
        self.heard.notify_waiters();
    }

    /// Begins a search unless one is under way.
    fn search_on(self: &Arc<Self>, state: &mut State) {
        if state.seeking {
            return;
        }
        state.seeking = true;
        let now = Instant::now();
        let rest = state.searched_at.filter(|_| state.usable).map(|then| {
            let next = then + SEARCH_PAUSE;
            next.saturating_duration_since(now)
        });
        state.searched_at = Some(now);
        let masters = Arc::clone(self);
        self.background.spawn(async move {
            tokio::time::sleep(rest.unwrap_or_default()).await;
            search::search(&masters).await;
        });
    }

    /// Tries a leader that only a standby reaches, now and then.
    fn probe_when_due(self: &Arc<Self>, state: &mut State) {
        let route = state.route.as_ref();
        let Some(leader) = route.and_then(|route| route.leader.clone()) else {
            return;
        };
        let now = Instant::now();
        if now < state.probe_at {
            return;
        }
        state.probe_at = now + PROBE_INTERVAL;
        let (masters, number) = (Arc::clone(self), state.number());
        self.background.spawn(async move {
            if search::leads(&masters, &leader).await {
                let mut state = masters.state.lock();
                if state.number() == number {
                    masters.take(&mut state, Route::to(leader, None));
                }
            }
        });
    }

    /// Asks where masters are announced, when that is due. Returns at once where some are known
    /// already: those announced are then learned of meanwhile.
    pub(super) async fn discover(self: &Arc<Self>) {
        let knows_some = {
            let mut state = self.state.lock();
            let now = Instant::now();
            let recent = |then: Instant| now.duration_since(then) < DISCOVERY_INTERVAL;
            if self.announced.is_empty() || state.discovered_at.is_some_and(recent) {
                return;
            }
            state.discovered_at = Some(now);
            !state.masters.is_empty()
        };
        let masters = Arc::clone(self);
        let asking = self.background.spawn(async move {
            for location in &masters.announced {
                match location.masters(DISCOVERY).await {
                    Ok(addresses) => {
                        masters.state.lock().undiscovered = None;
                        for address in addresses {
                            masters.at(&address);
                        }
                    }
                    Err(error) => {
                        tracing::debug!(%error, "master discovery through etcd failed");
                        let why = format!("master discovery through etcd failed: {error}");
                        masters.state.lock().undiscovered = Some(why);
                    }
                }
            }
        });
        if !knows_some {
            // It fails only as the runtime shuts down.
            let _ended = asking.await;
        }
    }

    /// The highest epoch seen.
    pub(super) fn epoch(&self) -> Epoch {
        self.known.epoch()
    }
}

impl State {
    fn usable_route(&self) -> Option<Route> {
        self.route.clone().filter(|_| self.usable)
    }

    /// Which route it is that calls go by, or went.
    fn number(&self) -> u64 {
        self.route.as_ref().map_or(0, |route| route.number)
    }
}
