//! Several masters, of which one leads: it is found from any of them, followed when it changes, and
//! left when it hangs.

use super::{block, key};
use crate::fake::{
    CommitFault, Master, Mode, Nodes, Passage, Role, Wire, connect, options, serve,
    serve_behind_wire,
};
use crate::{Client, PutError, PutOptions, PutOutcome, blocking};
use kvpool_types::Code;
use std::sync::Arc;
use std::time::{Duration, Instant};

const STORED: Result<PutOutcome, PutError> = Ok(PutOutcome::Stored { replicas: 1 });

/// A leader and a standby that names it.
struct Two {
    a: Arc<Master>,
    to_a: Wire,
    b: Arc<Master>,
    to_b: Wire,
}

impl Two {
    async fn start() -> Self {
        let a = Arc::new(Master::default());
        let to_a = serve_behind_wire(&a).await;
        let b = Arc::new(a.beside(Role::naming(&to_a.url)));
        let to_b = serve_behind_wire(&b).await;
        Self { a, to_a, b, to_b }
    }

    fn urls(&self) -> Vec<String> {
        vec![self.to_a.url.clone(), self.to_b.url.clone()]
    }

    async fn connect(&self) -> (Nodes, Client) {
        connect(options(self.urls())).await
    }

    /// The second master leads from now on, in a new term.
    fn promote(&self) {
        self.b.state().fail_over();
        self.b.own().role = Role::Leader;
    }

    /// The same later.
    fn promote_after(self: &Arc<Self>, pause: Duration) {
        let two = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            two.promote();
        });
    }

    /// The second master reaches the first, whatever clients do.
    fn let_b_reach_a(&self) {
        self.b.own().role = Role::Standby {
            leader: self.to_a.url.clone(),
            reaches: Some(Arc::clone(&self.a)),
        };
    }
}

async fn put(client: &Client, name: &str) -> Result<PutOutcome, PutError> {
    let blocks = vec![block(name, b"x")];
    let mut outcomes = client.batch_put(blocks, &PutOptions::default()).await;
    outcomes.remove(0)
}

async fn put_within(
    client: &Client,
    name: &str,
    timeout: Duration,
) -> Result<PutOutcome, PutError> {
    let options = PutOptions {
        timeout: Some(timeout),
        ..PutOptions::default()
    };
    let mut outcomes = client.batch_put(vec![block(name, b"x")], &options).await;
    outcomes.remove(0)
}

fn assert_soon(since: Instant, limit: Duration) {
    assert!(since.elapsed() < limit, "{:?}", since.elapsed());
}

#[tokio::test]
async fn a_leader_that_dies_is_followed_by_the_next() {
    let two = Arc::new(Two::start().await);
    let (_nodes, client) = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    two.to_a.set(Passage::Dead);
    two.promote_after(Duration::from_millis(700));
    let died = Instant::now();
    assert_eq!(put(&client, "b").await, STORED);
    assert!(died.elapsed() > Duration::from_millis(600));
    assert_soon(died, Duration::from_millis(1300));
    assert_eq!(client.epoch().0, 2);
    assert_eq!(client.get(&key("a")).await.unwrap().unwrap(), b"x");
}

#[tokio::test]
async fn a_standby_leads_to_a_leader_that_was_not_given() {
    let two = Two::start().await;
    let (_nodes, client) = connect(options(vec![two.to_b.url.clone()])).await;
    assert_eq!(put(&client, "a").await, STORED);
    // No call but the question went to the standby after the one that it refused.
    assert_eq!(two.b.own_calls("refused"), 1);
    assert_eq!(two.b.own_calls("passed on"), 0);
}

#[tokio::test]
async fn masters_that_were_not_given_are_learned() {
    let two = Two::start().await;
    two.a.own().members = two.urls();
    let (_nodes, client) = connect(options(vec![two.to_a.url.clone()])).await;
    assert_eq!(put(&client, "a").await, STORED);
    // It says whom else there is when it is asked who leads.
    two.a.own().role = Role::standby();
    two.b.own().role = Role::standby();
    assert!(
        put_within(&client, "b", Duration::from_millis(300))
            .await
            .is_err()
    );
    two.to_a.set(Passage::Dead);
    two.promote();
    assert_eq!(put(&client, "b").await, STORED);
}

#[tokio::test]
async fn a_standby_passes_calls_on_to_a_leader_that_only_it_reaches() {
    let two = Two::start().await;
    two.let_b_reach_a();
    let (_nodes, client) = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    assert_eq!(two.b.own_calls("passed on"), 0);
    two.to_a.set(Passage::Dead);
    let cut = Instant::now();
    assert_eq!(put(&client, "b").await, STORED);
    assert_soon(cut, Duration::from_millis(500));
    assert!(two.b.own_calls("passed on") >= 2);
    // The leader is tried directly now and then, and called so as soon as it answers.
    two.to_a.set(Passage::Open);
    let back = Instant::now();
    loop {
        assert_soon(back, Duration::from_secs(4));
        let before = two.b.own_calls("passed on");
        client.is_exist(&[key("a")]).await.unwrap();
        if two.b.own_calls("passed on") == before {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn a_leader_that_was_cut_off_is_called_over_a_standby_within_two_seconds() {
    let two = Two::start().await;
    two.let_b_reach_a();
    let (_nodes, client) = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    two.to_a.set(Passage::Silent);
    let cut = Instant::now();
    let timeout = Duration::from_secs(10);
    assert_eq!(put_within(&client, "b", timeout).await, STORED);
    assert_soon(cut, Duration::from_millis(2300));
    assert!(two.b.own_calls("passed on") >= 2);
}

/// A call by gRPC waits no longer on it than one by frames.
#[tokio::test]
async fn a_leader_that_hangs_is_left_within_two_seconds() {
    let two = Two::start().await;
    for grpc in [false, true] {
        let (_nodes, client) = two.connect().await;
        assert!(put(&client, "a").await.is_ok());
        two.to_a.set(Passage::Silent);
        two.promote();
        let hung = Instant::now();
        if grpc {
            // Its deadline would let an attempt wait as long; another is what ends it.
            client.describe(&[key("a")]).await.unwrap();
        } else {
            let timeout = Duration::from_secs(10);
            assert_eq!(put_within(&client, "b", timeout).await, STORED);
        }
        assert_soon(hung, Duration::from_millis(2200));
        two.to_a.set(Passage::Open);
        two.b.own().role = Role::naming(&two.to_a.url);
    }
}

#[tokio::test]
async fn a_first_master_that_hangs_delays_no_connect() {
    let two = Two::start().await;
    two.to_a.set(Passage::Silent);
    two.promote();
    let begun = Instant::now();
    let (_nodes, client) = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    assert_soon(begun, Duration::from_millis(700));
}

#[tokio::test]
async fn a_put_waits_for_a_leader_to_its_deadline_and_says_who_there_is() {
    let two = Two::start().await;
    let (_nodes, client) = two.connect().await;
    two.a.own().role = Role::standby();
    two.b.own().role = Role::standby();
    let begun = Instant::now();
    let timeout = Duration::from_millis(800);
    let error = put_within(&client, "a", timeout).await.unwrap_err();
    assert!(begun.elapsed() > Duration::from_millis(500));
    assert_soon(begun, Duration::from_millis(1100));
    assert_eq!(error.code(), Code::NotLeader);
    let text = error.to_string();
    assert!(
        text.contains("standby") && text.contains(&two.to_b.url),
        "{text}"
    );
}

/// A thousand clients do this at a time.
#[tokio::test]
async fn while_nobody_leads_one_search_asks_for_all_calls_and_pauses() {
    let two = Arc::new(Two::start().await);
    let (_nodes, client) = two.connect().await;
    two.a.own().role = Role::standby();
    two.b.own().role = Role::standby();
    let asked = |two: &Two| two.a.own_calls("cluster") + two.b.own_calls("cluster");
    let before = asked(&two);
    let mut puts = Vec::new();
    for n in 0..100 {
        let client = client.clone();
        let timeout = Duration::from_secs(10);
        puts.push(tokio::spawn(async move {
            put_within(&client, &format!("k{n}"), timeout).await
        }));
    }
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let rounds = asked(&two) - before;
    assert!((6..30).contains(&rounds), "{rounds} questions in 1.5 s");
    let promoted = Instant::now();
    two.promote();
    for put in puts {
        assert_eq!(put.await.unwrap(), STORED);
    }
    assert_soon(promoted, Duration::from_millis(700));
}

#[tokio::test]
async fn masters_that_name_each_other_are_not_called_without_a_pause() {
    let two = Two::start().await;
    let (_nodes, client) = two.connect().await;
    two.a.own().role = Role::naming(&two.to_b.url);
    let before = two.a.own_calls("refused") + two.b.own_calls("refused");
    let timeout = Duration::from_millis(1000);
    let error = put_within(&client, "a", timeout).await.unwrap_err();
    assert_eq!(error.code(), Code::NotLeader);
    let refused = two.a.own_calls("refused") + two.b.own_calls("refused") - before;
    assert!(refused < 20, "{refused}");
    // And when the lead comes and goes between them all is put in the end.
    two.promote();
    for turn in 0..6 {
        let (leads, stands) = match turn % 2 {
            0 => (&two.a, &two.b),
            _ => (&two.b, &two.a),
        };
        stands.state().fail_over();
        let leader = leads.own().address.clone();
        stands.own().role = Role::naming(&leader);
        leads.own().role = Role::Leader;
        assert_eq!(put(&client, &format!("k{turn}")).await, STORED);
    }
}

#[tokio::test]
async fn the_word_of_a_master_of_an_older_term_is_not_taken() {
    let two = Two::start().await;
    two.a.state().epoch = 5;
    let (_nodes, client) = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    // The first was cut off from the others and takes itself for the leader still.
    two.a.own().role = Role::naming(&two.to_b.url);
    two.promote();
    client.is_exist(&[key("a")]).await.unwrap();
    assert_eq!(client.epoch().0, 6);
    two.a.own().epoch = Some(5);
    two.a.own().role = Role::Leader;
    two.to_b.set(Passage::Dead);
    let timeout = Duration::from_millis(500);
    let error = put_within(&client, "b", timeout).await.unwrap_err();
    // Its calls say the newer epoch all the same, so only the search can have refused it.
    assert_eq!(two.a.own_calls("reserve"), 1);
    let text = error.to_string();
    assert!(text.contains("epoch 5 only, and 6 was seen"), "{text}");
}

#[tokio::test]
async fn a_master_that_does_not_know_the_question_is_called_as_before() {
    let two = Two::start().await;
    two.a.own().is_older = true;
    two.b.own().is_older = true;
    two.b.own().role = Role::Leader;
    let (_nodes, client) = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    two.to_a.set(Passage::Dead);
    let died = Instant::now();
    assert_eq!(put(&client, "b").await, STORED);
    assert_soon(died, Duration::from_millis(600));
}

/// The node has heard of the new term before the client: the grant is void there.
#[tokio::test]
async fn a_put_that_a_node_of_a_newer_term_refuses_is_put_under_that_term() {
    let two = Arc::new(Two::start().await);
    let (nodes, client) = two.connect().await;
    nodes.set(1, Mode::Fails(Code::StaleEpoch));
    let putting = tokio::spawn({
        let client = client.clone();
        async move { put(&client, "a").await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    // The old leader has not noticed: only the other one can tell.
    two.a.own().epoch = Some(1);
    two.promote();
    nodes.set(1, Mode::Well);
    let promoted = Instant::now();
    assert!(putting.await.unwrap().is_ok());
    assert_soon(promoted, Duration::from_secs(1));
}

#[tokio::test]
async fn a_commit_that_the_store_failed_is_put_again() {
    let two = Two::start().await;
    let (_nodes, client) = two.connect().await;
    let failed = CommitFault::Refused(Code::StoreFailed);
    two.a.state().commit_faults.extend([failed; 3]);
    assert_eq!(put(&client, "a").await, STORED);
    two.a.state().commit_faults.extend([failed; 1000]);
    let timeout = Duration::from_millis(300);
    let error = put_within(&client, "b", timeout).await.unwrap_err();
    // The store may have kept it: nobody can say that the block is not there.
    assert!(
        matches!(error, PutError::OutcomeUnknown { .. }),
        "{error:?}"
    );
    assert_eq!(error.code(), Code::StoreFailed);
}

/// It was stopped, say, and goes on under a successor that has what it committed.
#[tokio::test]
async fn a_commit_that_a_deposed_leader_answers_may_have_been_made() {
    let two = Two::start().await;
    let (_nodes, client) = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    let by_old = CommitFault::AnsweredByOld;
    two.a.state().commit_faults.extend([by_old; 1000]);
    let options = PutOptions {
        upsert: true,
        timeout: Some(Duration::from_millis(300)),
        ..PutOptions::default()
    };
    let error = client
        .batch_put(vec![block("a", b"y")], &options)
        .await
        .remove(0)
        .unwrap_err();
    assert!(
        matches!(error, PutError::OutcomeUnknown { .. }),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_commit_whose_leader_dies_is_present_when_it_is_put_again() {
    let two = Arc::new(Two::start().await);
    let (nodes, client) = two.connect().await;
    nodes.set(1, Mode::Slow(Duration::from_millis(100)));
    two.a
        .state()
        .commit_faults
        .push_back(CommitFault::AnswerLost);
    let putting = tokio::spawn({
        let client = client.clone();
        async move { put(&client, "a").await }
    });
    while two.a.own_calls("commit") == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    two.to_a.set(Passage::Dead);
    two.promote_after(Duration::from_millis(200));
    // What the old leader committed is what the new one has.
    assert_eq!(putting.await.unwrap(), Ok(PutOutcome::Present));
    assert_eq!(client.get(&key("a")).await.unwrap().unwrap(), b"x");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocking_client_follows_the_leader_too() {
    let two = Arc::new(Two::start().await);
    let urls = two.urls();
    let client = tokio::task::spawn_blocking(move || blocking::Client::connect(options(urls)));
    let client = client.await.unwrap().unwrap();
    for passage in [Passage::Dead, Passage::Silent] {
        let asking = client.clone();
        let ask = move || asking.is_exist(&[key("a")]);
        tokio::task::spawn_blocking(ask.clone())
            .await
            .unwrap()
            .unwrap();
        two.to_a.set(passage);
        two.promote_after(Duration::from_millis(200));
        let left = Instant::now();
        tokio::task::spawn_blocking(ask).await.unwrap().unwrap();
        assert_soon(left, Duration::from_millis(2300));
        two.to_a.set(Passage::Open);
        two.b.own().role = Role::naming(&two.to_a.url);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // Its runtimes end where blocking is allowed.
    tokio::task::spawn_blocking(|| drop(client)).await.unwrap();
}

#[tokio::test]
async fn a_slow_word_of_the_leader_is_waited_for_beside_other_questions() {
    let a = Arc::new(Master::default());
    a.own().slow = Duration::from_millis(250);
    let first = serve(Arc::clone(&a));
    let b = Arc::new(a.beside(Role::standby()));
    let second = serve(Arc::clone(&b));
    let begun = Instant::now();
    let (_nodes, client) = connect(options(vec![first, second])).await;
    assert_eq!(put(&client, "a").await, STORED);
    assert_soon(begun, Duration::from_millis(600));
}
