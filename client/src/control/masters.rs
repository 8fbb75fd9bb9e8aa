//! The known masters, and the route that calls take to the leader.
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

/// The most masters that are known from other masters. Masters in the options do not count.
const MOST_LEARNED: usize = 16;
/// How often the client tries to reach directly a leader that only a standby reaches.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);
/// How often a standby is asked whether the leader to which it forwards a call still leads.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// The time limit for each etcd endpoint to name the masters.
const DISCOVERY: Duration = Duration::from_millis(500);
/// The least time between two such questions.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(1);
/// The least time between two searches while only a read-only leader is known.
const SEARCH_PAUSE: Duration = Duration::from_millis(100);

/// The way that calls take to the leader.
#[derive(Clone, Debug)]
pub(super) struct Route {
    /// The master that is called.
    pub(super) master: Arc<Master>,
    /// The leader, if it cannot be reached directly and `master` forwards calls to it.
    pub(super) leader: Option<Arc<Master>>,
    /// Whether the leader is read-only: it answers only calls that change nothing.
    pub(super) read_only: bool,
    /// The number of the route; each new route gets the next.
    number: u64,
}

impl Route {
    /// A route that is not in use yet.
    pub(super) const fn to(master: Arc<Master>, leader: Option<Arc<Master>>) -> Self {
        Self {
            master,
            leader,
            read_only: false,
            number: 0,
        }
    }

    /// A route to a read-only leader.
    pub(super) fn to_read_only(master: Arc<Master>) -> Self {
        Self {
            read_only: true,
            ..Self::to(master, None)
        }
    }

    /// Whether both routes lead to the same master in the same way.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let leader = |route: &Self| route.leader.as_ref().map(|leader| leader.address.clone());
        self.master.address == other.master.address && leader(self) == leader(other)
    }
}

/// The known masters, and the route to the leader.
#[derive(Debug)]
pub(super) struct Masters {
    known: Arc<Known>,
    /// The etcd locations where masters are announced, beside the masters given by address.
    announced: Vec<Location>,
    spin: Duration,
    credentials: Credentials,
    tls: Option<ClientTls>,
    background: Handle,
    /// The simulated network, if there is one.
    carrier: Option<Arc<dyn Carry>>,
    state: Mutex<State>,
    /// Notified when a search has found a route or has found no leader. It wakes calls in the order in which
    /// they began to wait. A watch channel would wake them in random order.
    heard: Notify,
}

#[derive(Debug)]
struct State {
    /// The masters of the options, then the masters that other masters named.
    masters: Vec<Arc<Master>>,
    given: usize,
    /// The route; `None` before the first leader is found.
    route: Option<Route>,
    /// The number of routes so far.
    routes: u64,
    /// Whether calls may take the route. If not, they wait for the search.
    usable: bool,
    /// The code with which the route failed.
    failed: Option<Code>,
    seeking: bool,
    /// The number of calls that wait for a route.
    waiting: usize,
    /// The result of the last search that found no leader.
    nobody: Option<ControlError>,
    /// When a leader that only a standby reaches is next tried directly.
    probe_at: Instant,
    searched_at: Option<Instant>,
    discovered_at: Option<Instant>,
    /// The reason of the last failed discovery of masters through etcd.
    undiscovered: Option<String>,
    /// The offset into `masters` at which the next round of questions begins.
    turn: usize,
}

/// A call that waits for a route. A search continues while calls wait.
struct Waiting<'a>(&'a Masters);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        debug_assert!(state.waiting > 0, "a call stopped waiting that never began");
        state.waiting -= 1;
    }
}

impl Masters {
    /// The masters at `addresses`. If there are several, no call is made before the leader is known.
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
        // A single master can be called without first asking whether it leads.
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

    /// The settings for addresses that require TLS.
    pub(super) const fn tls(&self) -> Option<&ClientTls> {
        self.tls.as_ref()
    }

    /// The route to the leader. If there is none, this waits for a search.
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
            // The search ended for want of waiting calls just before this call began to wait.
            self.search_on(&mut state);
            heard.set(self.heard.notified());
        }
    }

    /// Records that a call over `route` failed with `code`, so that the master may be gone or not lead. The
    /// first such call of a route starts a search.
    pub(super) fn doubt(self: &Arc<Self>, route: &Route, code: Code) {
        let mut state = self.state.lock();
        if state.number() != route.number {
            return;
        }
        // A read-only leader still gets the calls that it answers.
        let stays = route.read_only && code == Code::NotLeader;
        state.usable &= stays;
        state.failed = Some(code);
        self.search_on(&mut state);
    }

    /// Whether calls go to a read-only leader.
    pub(super) fn are_read_only(&self) -> bool {
        let state = self.state.lock();
        state.usable_route().is_some_and(|route| route.read_only)
    }

    /// Starts a search, because a store node named a term that no master has named. Calls continue meanwhile.
    pub(super) fn look_about(self: &Arc<Self>) {
        self.search_on(&mut self.state.lock());
    }

    /// Returns when `route`, over which a standby forwards calls, is out of date. The result is the reason.
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

    /// Whether the master at `address` must not be called, because it lacks TLS.
    pub(super) fn refuse(&self, address: &str) -> bool {
        !address.starts_with(TLS_SCHEME) && self.tls.as_ref().is_some_and(ClientTls::refuses_plain)
    }

    /// The caller's identity and the highest epoch seen.
    pub(super) fn known(&self) -> &Known {
        &self.known
    }

    /// The master at `address`, which is added if it is new. `None` for a malformed address, and when too
    /// many masters are known.
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

    /// Adds the masters that the master at `by` names. Masters that were added earlier and that it does not
    /// name are removed. An empty list changes nothing.
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

    /// The masters in the order to ask them. Each call starts with another one. In the first round of a
    /// search, a master that said it does not lead comes first, since it may know the leader. A master that
    /// did not answer comes last.
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

    /// Ends a search that found a route.
    pub(super) fn found(&self, route: Route) {
        let mut state = self.state.lock();
        state.seeking = false;
        self.take(&mut state, route);
    }

    /// Ends a round that found no leader. Returns whether the search continues, because calls wait
    /// for it.
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

    /// Makes `route` the route of all calls.
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

    /// Starts a search unless one is in progress.
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

    /// Tries to reach the leader of a forwarded route directly, every [`PROBE_INTERVAL`].
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

    /// Asks etcd for the announced masters when this is due. If some masters are known already, it returns at
    /// once, and the answer is added later.
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
            // It fails only when the runtime shuts down.
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

    /// The number of the present or last route.
    fn number(&self) -> u64 {
        self.route.as_ref().map_or(0, |route| route.number)
    }
}
