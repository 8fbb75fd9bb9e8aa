//! Several masters, of which one leads. The client finds the leader from any of them, follows it when it
//! changes, and leaves it when it hangs.

use super::put::refuse_commits;
use super::{assert_soon, block, key};
use crate::testing::{self, Cluster, Fault, Master, Mode, Passage, Setup, Wire, connect, options};
use crate::{Client, PutError, PutOptions, PutOutcome, blocking};
use kvpool_proto::{ClusterReply, HelloReply, Outcomes};
use kvpool_types::{Code, Length};
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
        Self::start_at(1).await
    }

    async fn start_at(epoch: u64) -> Self {
        let setup = Setup {
            epoch,
            ..Setup::default()
        };
        let cluster = Cluster::start(setup).await;
        let (a, b) = (Master::start(&cluster), Master::start(&cluster));
        let (to_a, to_b) = (Wire::to(&a).await, Wire::to(&b).await);
        a.lead().await;
        b.resign_to(&to_a.url).await;
        Self { a, to_a, b, to_b }
    }

    fn urls(&self) -> Vec<String> {
        vec![self.to_a.url.clone(), self.to_b.url.clone()]
    }

    async fn connect(&self) -> Client {
        connect(&self.a, options(self.urls())).await
    }

    /// Makes neither master lead.
    async fn depose(&self) {
        self.a.resign_to("").await;
        self.b.resign_to("").await;
    }

    /// Makes the second master lead, in a new term.
    async fn promote(&self) {
        self.a.resign_to("").await;
        self.b.lead().await;
    }

    /// Makes the second master lead after `pause`.
    fn promote_after(self: &Arc<Self>, pause: Duration) {
        let two = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            two.promote().await;
        });
    }

    /// Makes the first master lead again.
    async fn give_back(&self) {
        self.b.resign_to(&self.to_a.url).await;
        self.a.lead().await;
        self.to_a.set(Passage::Open);
    }

    /// Lets the second master reach the first, whatever clients can reach.
    async fn let_b_reach_a(&self) {
        self.b.resign_to(self.a.own_url()).await;
        let url = self.to_a.url.clone();
        self.b
            .on_answer("cluster", move |reply: &mut ClusterReply| {
                reply.leader.clone_from(&url);
            });
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

#[tokio::test]
async fn a_leader_that_dies_is_followed_by_the_next() {
    let two = Arc::new(Two::start().await);
    let client = two.connect().await;
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
    let client = connect(&two.a, options(vec![two.to_b.url.clone()])).await;
    assert_eq!(put(&client, "a").await, STORED);
    // The standby refused one call. After that the client only asked it which master leads.
    assert_eq!(two.b.calls("refused"), 1);
    assert_eq!(two.b.calls("passed on"), 0);
}

#[tokio::test]
async fn masters_that_were_not_given_are_learned() {
    let two = Two::start().await;
    two.a.name_members(&two.urls());
    let client = connect(&two.a, options(vec![two.to_a.url.clone()])).await;
    assert_eq!(put(&client, "a").await, STORED);
    // Its answer about the leader also names the other masters.
    two.depose().await;
    assert!(
        put_within(&client, "b", Duration::from_millis(300))
            .await
            .is_err()
    );
    two.to_a.set(Passage::Dead);
    two.promote().await;
    assert_eq!(put(&client, "b").await, STORED);
}

#[tokio::test]
async fn a_standby_passes_calls_on_to_a_leader_that_only_it_reaches() {
    let two = Two::start().await;
    two.let_b_reach_a().await;
    let client = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    assert_eq!(two.b.calls("passed on"), 0);
    two.to_a.set(Passage::Dead);
    let cut = Instant::now();
    assert_eq!(put(&client, "b").await, STORED);
    assert_soon(cut, Duration::from_millis(500));
    assert!(two.b.calls("passed on") >= 2);
    // The leader is tried directly at intervals, and called directly as soon as it answers.
    two.to_a.set(Passage::Open);
    let back = Instant::now();
    loop {
        assert_soon(back, Duration::from_secs(4));
        let before = two.b.calls("passed on");
        client.is_exist(&[key("a")]).await.unwrap();
        if two.b.calls("passed on") == before {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn a_leader_that_was_cut_off_is_called_over_a_standby_within_two_seconds() {
    let two = Two::start().await;
    two.let_b_reach_a().await;
    let client = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    two.to_a.set(Passage::Silent);
    let cut = Instant::now();
    let timeout = Duration::from_secs(10);
    assert_eq!(put_within(&client, "b", timeout).await, STORED);
    assert_soon(cut, Duration::from_millis(2300));
    assert!(two.b.calls("passed on") >= 2);
}

/// A call by gRPC waits no longer on it than one by frames.
#[tokio::test]
async fn a_leader_that_hangs_is_left_within_two_seconds() {
    let two = Two::start().await;
    for grpc in [false, true] {
        let client = two.connect().await;
        assert!(put(&client, "a").await.is_ok());
        two.to_a.set(Passage::Silent);
        two.promote().await;
        let hung = Instant::now();
        if grpc {
            // The call's deadline would allow a longer wait, so it is not the deadline that ends the attempt.
            client.describe(&[key("a")]).await.unwrap();
        } else {
            let timeout = Duration::from_secs(10);
            assert_eq!(put_within(&client, "b", timeout).await, STORED);
        }
        assert_soon(hung, Duration::from_millis(2200));
        two.give_back().await;
    }
}

#[tokio::test]
async fn a_first_master_that_hangs_delays_no_connect() {
    let two = Two::start().await;
    two.to_a.set(Passage::Silent);
    two.promote().await;
    let begun = Instant::now();
    let client = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    assert_soon(begun, Duration::from_millis(700));
}

#[tokio::test]
async fn a_put_waits_for_a_leader_to_its_deadline_and_says_who_there_is() {
    let two = Two::start().await;
    let client = two.connect().await;
    two.depose().await;
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

/// One master may have a wrong key, and the next leader the right one.
#[tokio::test]
async fn while_nobody_leads_one_master_that_refuses_the_token_fails_no_put() {
    let two = Arc::new(Two::start().await);
    let client = two.connect().await;
    two.depose().await;
    two.a.always("cluster", Fault::TokenRefused);
    two.promote_after(Duration::from_millis(500));
    let begun = Instant::now();
    assert_eq!(
        put_within(&client, "a", Duration::from_secs(5)).await,
        STORED
    );
    assert!(begun.elapsed() > Duration::from_millis(400));
}

#[tokio::test]
async fn a_token_that_every_master_refuses_is_not_tried_to_the_deadline() {
    let two = Two::start().await;
    let client = two.connect().await;
    two.depose().await;
    two.a.always("cluster", Fault::TokenRefused);
    two.b.always("cluster", Fault::TokenRefused);
    let begun = Instant::now();
    let timeout = Duration::from_secs(5);
    let error = put_within(&client, "a", timeout).await.unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated);
    assert_soon(begun, Duration::from_secs(2));
}

/// A thousand clients do this at a time.
#[tokio::test]
async fn while_nobody_leads_one_search_asks_for_all_calls_and_pauses() {
    let two = Arc::new(Two::start().await);
    let client = two.connect().await;
    two.depose().await;
    let asked = |two: &Two| two.a.calls("cluster") + two.b.calls("cluster");
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
    two.promote().await;
    for put in puts {
        assert_eq!(put.await.unwrap(), STORED);
    }
    assert_soon(promoted, Duration::from_millis(700));
}

#[tokio::test]
async fn masters_that_name_each_other_are_not_called_without_a_pause() {
    let two = Two::start().await;
    let client = two.connect().await;
    two.a.resign_to(&two.to_b.url).await;
    let before = two.a.calls("refused") + two.b.calls("refused");
    let timeout = Duration::from_millis(1000);
    let error = put_within(&client, "a", timeout).await.unwrap_err();
    assert_eq!(error.code(), Code::NotLeader);
    let refused = two.a.calls("refused") + two.b.calls("refused") - before;
    assert!(refused < 20, "{refused}");
    // Leadership changes between the masters, and all blocks are put in the end.
    two.promote().await;
    for turn in 0..6 {
        let (leads, stands) = match turn % 2 {
            0 => (&two.a, &two.b),
            _ => (&two.b, &two.a),
        };
        stands.resign_to(&leads.url()).await;
        leads.lead().await;
        assert_eq!(put(&client, &format!("k{turn}")).await, STORED);
    }
}

#[tokio::test]
async fn the_word_of_a_master_of_an_older_term_is_not_taken() {
    let two = Two::start_at(5).await;
    let client = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    // The first master is cut off from the others and still considers itself the leader.
    two.to_a.set(Passage::Dead);
    two.b.lead().await;
    client.is_exist(&[key("a")]).await.unwrap();
    assert_eq!(client.epoch().0, 6);
    two.to_b.set(Passage::Dead);
    two.to_a.set(Passage::Open);
    let timeout = Duration::from_millis(500);
    let error = put_within(&client, "b", timeout).await.unwrap_err();
    assert_eq!(two.a.calls("reserve"), 1);
    let text = error.to_string();
    assert!(text.contains("epoch 5 only, and 6 was seen"), "{text}");
}

#[tokio::test]
async fn a_master_that_does_not_know_the_question_is_called_as_before() {
    let two = Two::start().await;
    two.a.always("cluster", Fault::Unknown);
    two.b.always("cluster", Fault::Unknown);
    let client = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    two.to_a.set(Passage::Dead);
    two.promote().await;
    let died = Instant::now();
    assert_eq!(put(&client, "b").await, STORED);
    assert_soon(died, Duration::from_millis(600));
}

/// The node knows the new term before the client does, so the grant is void there.
#[tokio::test]
async fn a_put_that_a_node_of_a_newer_term_refuses_is_put_under_that_term() {
    let two = Two::start().await;
    let client = two.connect().await;
    // The old leader has not noticed. Only the other master can name the leader.
    two.b.lead().await;
    let promoted = Instant::now();
    assert_eq!(put(&client, "a").await, STORED);
    assert_soon(promoted, Duration::from_secs(1));
    assert_eq!(two.a.calls("commit"), 0);
    assert_eq!(client.epoch().0, 2);
}

#[tokio::test]
async fn a_commit_that_the_store_failed_is_put_again() {
    let two = Two::start().await;
    let client = two.connect().await;
    refuse_commits(&two.a, 3, Code::StoreFailed);
    assert_eq!(put(&client, "a").await, STORED);
    refuse_commits(&two.a, usize::MAX, Code::StoreFailed);
    let timeout = Duration::from_millis(300);
    let error = put_within(&client, "b", timeout).await.unwrap_err();
    // The store may have kept the commit, so the client cannot report that the block is absent.
    assert!(
        matches!(error, PutError::OutcomeUnknown { .. }),
        "{error:?}"
    );
    assert_eq!(error.code(), Code::StoreFailed);
}

/// A leader with a block limit of 1 KiB, and a standby with a limit of 1 MiB.
async fn with_limits() -> (Two, Client) {
    let two = Two::start().await;
    for (master, most) in [(&two.a, 1 << 10), (&two.b, 1 << 20)] {
        master.on_answer("hello", move |reply: &mut HelloReply| {
            reply.max_block_bytes = most;
        });
    }
    let client = two.connect().await;
    assert_eq!(client.limits().max_block, Length(1 << 10));
    (two, client)
}

#[tokio::test]
async fn a_block_is_too_large_only_if_the_present_leader_says_so() {
    let (two, client) = with_limits().await;
    let put = async || {
        let blocks = vec![block("a", &[7; 4096])];
        let mut outcomes = client.batch_put(blocks, &PutOptions::default()).await;
        outcomes.remove(0)
    };
    assert_eq!(put().await.unwrap_err().code(), Code::TooLarge);
    two.promote().await;
    assert_eq!(put().await, STORED);
}

#[tokio::test]
async fn the_limits_of_a_new_term_are_learned_with_any_answer() {
    let (two, client) = with_limits().await;
    two.promote().await;
    client.is_exist(&[key("a")]).await.unwrap();
    let asked = Instant::now();
    while client.limits().max_block != Length(1 << 20) {
        assert_soon(asked, Duration::from_secs(2));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // The limit is asked for once per term, beside the greeting of the connection.
    let greeted = two.b.calls("hello");
    client.is_exist(&[key("a")]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(two.b.calls("hello"), greeted);
}

/// The old leader may have been stopped, and continue under a successor that has its commits.
#[tokio::test]
async fn a_commit_that_a_deposed_leader_answers_may_have_been_made() {
    let two = Two::start().await;
    let client = two.connect().await;
    assert_eq!(put(&client, "a").await, STORED);
    two.a
        .on_answer("commit", |answer: &mut Outcomes| answer.epoch -= 1);
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
async fn a_commit_whose_leader_dies_is_not_made_twice() {
    let two = Arc::new(Two::start().await);
    let client = two.connect().await;
    for node in [1, 2] {
        let slow = Mode::Slow(Duration::from_millis(100));
        two.a.cluster.nodes.set(node, slow);
    }
    two.a.next("commit", [Fault::AnswerLost]);
    let putting = tokio::spawn({
        let client = client.clone();
        async move { put(&client, "a").await }
    });
    let committed = loop {
        if let Some(block) = two.a.described("a") {
            break block.version;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    two.to_a.set(Passage::Dead);
    two.promote_after(Duration::from_millis(200));
    assert_eq!(putting.await.unwrap(), STORED);
    // The new leader has the commits of the old one.
    assert_eq!(two.b.described("a").unwrap().version, committed);
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
        two.give_back().await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // The runtimes of the client must end on a thread that may block.
    tokio::task::spawn_blocking(|| drop(client)).await.unwrap();
}

#[tokio::test]
async fn a_slow_word_of_the_leader_is_waited_for_beside_other_questions() {
    let a = testing::leader(Setup::default()).await;
    a.always("cluster", Fault::Late(Duration::from_millis(250)));
    let b = Master::start(&a.cluster);
    let begun = Instant::now();
    let client = connect(&a, options(vec![a.url(), b.url()])).await;
    assert_eq!(put(&client, "a").await, STORED);
    assert_soon(begun, Duration::from_millis(600));
}
