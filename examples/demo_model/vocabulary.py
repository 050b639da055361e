"""Common English words by kind, for phrases that tools receive as text."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


THINGS = _words(
    "account address advice age air airport album alarm animal answer apartment arm army art article aunt baby bag ball band bank bar bath "
    "battery beach bed bell bench bike bill bird birthday blanket blood boat body bone book boots bottle bowl box boy brain brake branch "
    "bread breakfast brother brush budget building bus business butter cabinet cake calendar camp car card carpet cat chair chance change "
    "cheese chef chicken child chocolate church cinema class client clinic clock clothes coach coast coat code coffee coin collar college "
    "color company computer concert contract cookie copy corner cost couch country couple course court cousin cover cow cream crew crowd "
    "culture cup curtain customer dad dance date daughter deal debt deck dentist desk dinner dish doctor dog door dream dress drink driver "
    "dust ear earth egg elbow energy engineer envelope evening event exam example exercise eye face fact family fan farm farmer father fee "
    "fence festival fever field film finger fire fish flag flat flight floor flower fog food foot football fork form fridge friend fruit "
    "fuel furniture future game garage garlic gas gate gift girl glass glove goal gold grass guest guide gun gym hair half hall hand hat "
    "head headphones health heart heat help history hobby hole holiday home horse hospital hotel hour house ice idea insurance interview "
    "iron job joke journey juice key keyboard kid king kitchen knee knife laptop law lawyer leader leaf lecture leg lesson letter level "
    "library life lip list lunch machine magazine mail manager map market match meal meat medicine meeting member memory menu message "
    "metal milk mind minute mistake mom money month morning mother mouse mouth movie museum music nail name neck neighbor news newspaper "
    "night noise nose note number nurse oil onion opinion order oven owner page pain paint pair pan pants parent park part party passport "
    "path payment peace pen pencil people phone photo picture pig pill pillow plan plane plate player pocket poem police pool potato price "
    "prize problem program project puppy purse queen question radio rain razor reason recipe record rent report rest result rice ring "
    "risk road roof room rope rose rule salad salary sale salt sandwich school science scissors score sea season seat service shampoo "
    "shape sheep sheet shelf ship shirt shoe shoes shop shoulder show shower side sign sink sister size skin skirt sky sleep smell smile "
    "snow soap sock song soul sound soup space speech speed spoon sport stage stairs stamp station steak step stomach store story street "
    "student study subject sugar suit summer sun surprise sweater table tax taxi tea teacher team test theater theory thing ticket tie "
    "time tire toast toilet tomato tool tooth toothbrush towel town toy track trade traffic train travel trip truck trust truth uncle "
    "university vacation vegetable video view village visit voice wall war watch weather wedding week weekend weight wheel wife wind wine "
    "woman wood word work worker world year"
)  # fmt: skip
ACTIONS = _words(
    "accept add agree allow announce answer arrive ask attend bake bring build buy call cancel carry catch change charge check choose clean "
    "climb close collect come compare complain cook copy count cover cross cut dance decide deliver describe design discuss draw dress "
    "drink drive drop eat empty enjoy enter exchange explain fill find finish fix fly fold follow forget get give go greet guess hang hear "
    "help hide hold hope hurry improve invite join jump keep kick know laugh learn leave lend lift like listen live lock look lose love "
    "make mark marry measure meet mention miss mix move need offer open order organize pack paint park pass pay pick plan plant play pour "
    "practice prepare press print promise pull push put read receive remember remove rent repair repeat replace reply rest return ride "
    "ring run save say see sell send share show sing sit sleep smell smile speak spend stand start stay steal stop study suggest swim take "
    "talk taste teach tell thank think throw tie touch travel trust try turn type understand use visit wait wake walk want wash watch wear "
    "win wish wonder work worry write"
)  # fmt: skip
QUALITIES = _words(
    "able angry awful bad beautiful big bitter black blue boring brown careful cheap cheerful clean clear comfortable common cool correct "
    "crazy cute dangerous dark dead dear different difficult dirty double easy electric equal excellent expensive extra fair false famous "
    "favorite few final first flat foreign free fresh friendly full funny glad good great green grey half hard healthy high honest hot huge "
    "hungry ill important interesting last lazy left long loose low lucky married medium modern natural near necessary nervous next nice "
    "normal old open orange original perfect personal pink poor popular possible pretty private proud real ready red rich right sad safe "
    "same second serious sick similar single soft sorry sour special stupid sweet tall tasty terrible thick thin tired true ugly used "
    "useful usual vegan warm weak wet whole wide wooden wrong yellow"
)  # fmt: skip
HOW = _words("again alone already always away badly back early easily everywhere fast finally here inside later maybe never now often once outside quickly really slowly somewhere soon still there today together tomorrow tonight twice very well yesterday")  # fmt: skip
WHO = ("I", "you", "we", "they", "he", "she", "it", "the boss", "my brother", "my sister", "everybody", "nobody", "the kids", "the team", "mom", "dad", "our neighbor", "the customer", "someone")  # fmt: skip
JOIN = ("and", "but", "because", "so", "while", "when", "if", "after", "before", "or")
PLACE = ("in the {t}", "at the {t}", "on the {t}", "near the {t}", "under the {t}", "for the {t}", "with the {t}", "without the {t}", "from the {t}", "to the {t}", "of the {t}", "about the {t}", "in our {t}", "with my {t}", "behind the {t}", "next to the {t}")  # fmt: skip
