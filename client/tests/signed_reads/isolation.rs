//! A node that keeps its memory to callers of every namespace.

use crate::pool::{Pool, Port, Shape};
use crate::{bytes, key, only, put};
use kvpool_client::TransportChoice;
use kvpool_store_node::Isolation;
use kvpool_types::Code;
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread")]
async fn a_strict_node_gives_its_memory_to_callers_of_every_namespace_only() {
    let pool = Pool::with(Shape::of(1, true, Isolation::Strict)).await;
    let tcp = pool.client("a", "a").await;
    put(&tcp, "x", 1).await;
    let x = only(&pool, "a", "x").await;

    // A tenant gets neither a mapping nor queue pairs. Its client continues over TCP.
    let refused = x.shm_link(pool.token("a")).await.map(drop);
    assert_eq!(refused, Err(Code::Forbidden));
    let mut port = Port::open(&x, pool.token("a"));
    assert_eq!(port.open_rdma(), Code::Forbidden);
    assert!(port.read(x.epoch, x.item()) == (Code::Ok, bytes(1, x.length())));
    let any = pool.client_over("a", "a", TransportChoice::Auto).await;
    put(&any, "y", 2).await;
    for name in ["x", "y"] {
        assert!(any.get(&key(name)).await.unwrap().is_some());
    }

    // It does not ask for the memory again with each call.
    let begun = Instant::now();
    for _ in 0..40 {
        assert!(any.get(&key("y")).await.unwrap().is_some());
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    let (asked, took) = (any.counters().link_failures, begun.elapsed());
    let may_ask_again = took > Duration::from_secs(20);
    assert!(asked == 1 || may_ask_again, "{asked} times in {took:?}");

    // A caller that may write in every namespace may map memory. This node has no RDMA.
    assert!(x.shm_link(pool.token("root")).await.is_ok());
    let mut port = Port::open(&x, pool.token("root"));
    assert_eq!(port.open_rdma(), Code::InvalidArgument);
    drop((tcp, any));
    pool.stop().await;
}
