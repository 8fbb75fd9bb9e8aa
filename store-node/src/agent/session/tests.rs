use super::*;
use futures::FutureExt as _;

/// As with a name server that is away while masters and nodes come back.
#[tokio::test]
async fn a_master_is_reached_when_its_name_takes_longer_than_a_connection_may() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let names = Names::new(move |name| {
        assert_eq!(name, "master.example:7070");
        let found = async move {
            tokio::time::sleep(CONNECT + Duration::from_millis(500)).await;
            Ok(vec![address])
        };
        found.boxed()
    });
    let accepted = tokio::spawn(async move { listener.accept().await.unwrap() });
    let way = way_to("http://master.example:7070", None, None, &names).await;
    let failed = way.err();
    assert!(failed.is_none(), "{failed:?}");
    accepted.await.unwrap();
}
